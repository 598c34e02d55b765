"""Sparse matrices and arrays of scipy: their format, shape and arrays."""

from __future__ import annotations

from typing import Any, Final

import scipy.sparse

from dfm_async.wire.codec.libraries.array_checks import array
from dfm_async.wire.codec.registry import NamedCodec, Unsupported, register_ours

_COMPRESSED: Final = ("csr", "csc", "bsr")
_PARTS: Final = {
    **dict.fromkeys(_COMPRESSED, ("data", "indices", "indptr")),
    "coo": ("data", "coords"),
    "dia": ("data", "offsets"),
}
"""By format: the arrays that a matrix is made of. Other formats travel as ``coo``."""
_CLASSES: Final = {
    f"{form}_{kind}": getattr(scipy.sparse, f"{form}_{kind}")
    for form in (*_PARTS, "lil", "dok")
    for kind in ("matrix", "array")
}

_ELEMENTS: Final = "biufcO"
"""The kinds of types that elements may have."""
_ROWS: Final = 1 << 18
_ROWS_PER_ELEMENT: Final = 16
"""The number of rows that a ``lil`` matrix may have: each takes two lists, even if it is empty."""


def _encode(value: Any) -> Any:
    _check_rows(value.format, value.shape, value.nnz)
    kind = value if value.format in _PARTS else value.tocoo()
    return [list(value.shape), kind.format, [getattr(kind, name) for name in _PARTS[kind.format]]]


def _check_rows(form: str, shape: Any, stored: int) -> None:
    if form == "lil" and shape[0] > max(_ROWS, _ROWS_PER_ELEMENT * stored):
        raise Unsupported(f"it has {shape[0]:,} rows for {stored:,} elements; convert it to CSR")


def _canonical(value: Any) -> Any:
    """Encode a matrix with its elements in order, and no position twice."""
    if value.format in _COMPRESSED and not value.has_canonical_format:
        value = value.copy()
        value.sum_duplicates()
    elif value.format not in (*_COMPRESSED, "dia"):
        value = value.tocoo(copy=True)
        value.sum_duplicates()
    return _encode(value)


def _decoder(name: str) -> Any:
    cls = _CLASSES[name]
    form, _, kind = name.partition("_")

    def decode(state: Any) -> Any:
        shape, stored, parts = state
        if stored != (form if form in _PARTS else "coo"):
            raise ValueError(f"a {name} cannot be made of {stored}")
        if type(shape) is not list or type(parts) is not list or len(parts) != len(_PARTS[stored]):
            raise TypeError(f"this is not the state of a {name}")
        if array(parts[0]).dtype.kind not in _ELEMENTS:
            raise TypeError(f"a matrix has no elements of type {parts[0].dtype}")
        if form in _COMPRESSED:
            found = cls(tuple(map(array, parts)), shape=shape)
            found.check_format(full_check=True)  # positions outside of the shape would be read from other memory
            return found
        data, positions = parts
        if stored == "coo":
            if type(positions) is not tuple or len(positions) != len(shape):
                raise TypeError("an array of positions was expected for each dimension")
            positions = tuple(map(array, positions))
        _check_rows(form, shape, len(data))
        made = _CLASSES[f"{stored}_{kind}"]((data, positions if stored == "coo" else array(positions)), shape=shape)
        return made if form in _PARTS else made.asformat(form)

    return decode


def _preview(value: Any, _items: int) -> dict[str, Any]:
    return {
        "type": f"scipy.sparse.{type(value).__name__}",
        "shape": list(value.shape),
        "dtype": str(value.dtype),
        "stored": int(value.nnz),
    }


register_ours(
    *(
        NamedCodec(
            type=cls,
            name=f"scipy.sparse.{name}",
            encode=_encode,
            decode=_decoder(name),
            canonical=_canonical,
            preview=_preview,
            ours=True,
        )
        for name, cls in _CLASSES.items()
    )
)
