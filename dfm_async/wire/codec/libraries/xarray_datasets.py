"""Datasets and arrays of xarray: dimensions, coordinates, attributes and arrays. Encodings are left out."""

from __future__ import annotations

from typing import Any

import numpy
import pandas
import xarray
import xarray.indexes

from dfm_async.wire.codec.libraries.array_checks import array
from dfm_async.wire.codec.registry import NamedCodec, Unsupported, register_ours


def _variable(value: Any) -> list[Any]:
    return [list(value.dims), _content(value), dict(value.attrs)]


def _content(value: Any) -> Any:
    """Return the values of a variable: an array of numpy where that holds them, else one of pandas."""
    if isinstance(value.dtype, numpy.dtype):
        return value.to_numpy()
    found = value.data
    if isinstance(found, numpy.ndarray):
        found = value._data  # noqa: SLF001 - xarray converts texts of pandas, but not their type
    found = getattr(found, "array", found)  # some versions wrap it
    if not isinstance(found, pandas.api.extensions.ExtensionArray):
        raise Unsupported(f"no codec knows its values of type {value.dtype}")
    return found


def _coordinates(value: Any) -> dict[str, Any]:
    """Return the coordinates, and their indexes. Those of pandas are sent as they are, if they give the same values."""
    indexes, named = [], []
    for index, variables in value.xindexes.group_by_index():
        if type(index) is xarray.indexes.PandasMultiIndex or _is_plain(index):
            indexes.append([index.dim, index.index, {name: dict(found.attrs) for name, found in variables.items()}])
        elif type(index) is xarray.indexes.PandasIndex:
            named += list(variables)
        else:
            raise Unsupported(f"no codec knows its index of type {type(index).__name__}")
    sent = {name for _, _, variables in indexes for name in variables}
    variables = [[name, _variable(found)] for name, found in value.coords.variables.items() if name not in sent]
    return {"variables": variables, "indexed": named, "indexes": indexes, "order": list(value.coords)}


def _is_plain(index: Any) -> bool:
    """Return whether the values of an index have the type that they have in pandas, unlike texts of a fixed length."""
    if type(index) is not xarray.indexes.PandasIndex:
        return False
    return bool(xarray.indexes.PandasIndex(index.index, index.dim).coord_dtype == index.coord_dtype)


def _built(state: Any) -> Any:
    dims, data, attrs = state
    return xarray.Variable(tuple(dims), _array(data), attrs)


def _array(data: Any) -> Any:
    return data if isinstance(data, pandas.api.extensions.ExtensionArray) else array(data)


def _built_coordinates(state: Any) -> Any:
    variables: dict[Any, Any] = {name: _built(found) for name, found in state["variables"]}
    indexes: dict[Any, Any] = {}
    for name in state["indexed"]:
        indexes[name] = xarray.indexes.PandasIndex.from_variables({name: variables[name]}, options={})
        variables.update(indexes[name].create_variables({name: variables[name]}))
    for dim, found, attrs in state["indexes"]:
        if not isinstance(found, pandas.Index):
            raise TypeError("an index of pandas was expected")
        multi = isinstance(found, pandas.MultiIndex)
        index = (xarray.indexes.PandasMultiIndex if multi else xarray.indexes.PandasIndex)(found, dim)
        for name, variable in index.create_variables().items():
            variable.attrs = attrs[name]
            variables[name], indexes[name] = variable, index
    return xarray.Coordinates({name: variables[name] for name in state["order"]}, indexes=indexes)


def _encode(value: Any) -> Any:
    variables = [[name, _variable(found.variable)] for name, found in value.data_vars.items()]
    return {"variables": variables, "coords": _coordinates(value), "attrs": dict(value.attrs)}


def _decode(state: Any) -> Any:
    variables = {name: _built(found) for name, found in state["variables"]}
    return xarray.Dataset(variables, coords=_built_coordinates(state["coords"]), attrs=state["attrs"])


def _encode_array(value: Any) -> Any:
    return {"name": value.name, "data": _variable(value.variable), "coords": _coordinates(value)}


def _decode_array(state: Any) -> Any:
    dims, data, attrs = state["data"]
    coords = _built_coordinates(state["coords"])
    return xarray.DataArray(_array(data), coords=coords, dims=dims, name=state["name"], attrs=attrs)


def _part_preview(value: Any, items: int) -> dict[str, Any]:
    kind = {"dims": list(value.dims), "shape": list(value.shape), "dtype": str(value.dtype)}
    found = {**kind, "attrs": dict(value.attrs)}
    if not 0 < value.size <= items:
        return found
    if not isinstance(value.dtype, numpy.dtype):
        return {**found, "values": _content(value.variable)}
    data = value.to_numpy()
    # Nanoseconds would be written as numbers.
    return {**found, "values": data.astype("M8[us]").tolist() if data.dtype.kind == "M" else data}


def _preview(value: Any, items: int) -> dict[str, Any]:
    each = items // max(1, len(value.variables))
    return {
        "type": "xarray.Dataset",
        "dims": {str(name): size for name, size in value.sizes.items()},
        "coords": {str(name): _part_preview(found, each) for name, found in value.coords.items()},
        "variables": {str(name): _part_preview(found, each) for name, found in value.data_vars.items()},
        "attrs": dict(value.attrs),
    }


def _array_preview(value: Any, items: int) -> dict[str, Any]:
    each = items // (1 + len(value.coords))
    coords = {str(name): _part_preview(found, each) for name, found in value.coords.items()}
    return {"type": "xarray.DataArray", "name": value.name, **_part_preview(value, each), "coords": coords}


register_ours(
    NamedCodec(
        type=xarray.Dataset,
        name="xarray.Dataset",
        encode=_encode,
        decode=_decode,
        preview=_preview,
        ours=True,
    ),
    NamedCodec(
        type=xarray.DataArray,
        name="xarray.DataArray",
        encode=_encode_array,
        decode=_decode_array,
        preview=_array_preview,
        ours=True,
    ),
)
