// Previews of values: arrays, tables, series, datasets and images, in the JSON of the service.

import { bytes, count, h, s, short, table } from "./dom.js";

const ROWS = 20;
const COLUMNS = 12;
const CELL = 60;
const MAP = 96; // cells of a heat map in each direction
const POINTS = 400;

const times = shape => (shape.length ? shape.map(count).join(" × ") : "a scalar");
const numbers = list => list.every(item => typeof item === "number" || item === null);

function cell(value) {
  const text = typeof value === "number" ? short(value) : typeof value === "string" ? value : JSON.stringify(value) ?? "null";
  return h("td", { class: typeof value === "number" && "num" }, text.length > CELL ? `${text.slice(0, CELL)} …` : text);
}

const FILES = { PNG: /^iVBORw0KGgo/, JPEG: /^\/9j\//, WebP: /^UklGR.{7}RUJQ/ }; // as base64
const fileType = value => (typeof value === "string" && value.length > 48 ? Object.keys(FILES).find(name => FILES[name].test(value)) : undefined);

/** Whether the service may have a preview of a value as an image: it has the last word. */
export function isImage(value) {
  if (fileType(value)) return true;
  const { type, shape, size, mode, dtype, omitted } = value ?? {};
  if (type === "numpy.ndarray") return dtype === "uint8" && (shape?.length === 2 || (shape?.length === 3 && [1, 3, 4].includes(shape[2])));
  return (type === "PIL.Image.Image" && typeof mode === "string" && Array.isArray(size)) || (type === "bytes" && omitted === true);
}

/** Says what a value is, in a line; null if its JSON says it best. */
export function title(value) {
  if (fileType(value)) return `${fileType(value)} image, ${bytes(value.length * 0.75)}`;
  if (Array.isArray(value)) {
    const shape = shapeOf(value);
    const pixels = shape ? null : colourShape(value);
    if (pixels) return `${times(pixels)} numbers`;
    return shape && `${times(shape)} ${numbers(shape.length === 2 ? value.flat() : value) ? "numbers" : "values"}`;
  }
  const { type, shape, size, mode, dims, columns, dtype, name } = value ?? {};
  if (typeof type !== "string") return null;
  if (Array.isArray(shape)) return [`${type}, ${times(shape)}`, name, dtype, columns?.slice(0, COLUMNS).map(String).join(", ")].filter(Boolean).join(", ");
  if (mode && Array.isArray(size)) return `${type}, ${mode}, ${times(size)} pixels`;
  if (dims && typeof dims === "object") return `${type}, ${Array.isArray(dims) ? dims.join(" × ") : Object.entries(dims).map(([dim, length]) => `${dim} ${count(length)}`).join(" × ")}`;
  if (value.omitted) return `${type}, ${value.json_bytes ? `${bytes(value.json_bytes)} of JSON, ` : ""}too large to show`;
  return null;
}

/** Shows the image at an address. */
export function image(source, label) {
  const shown = h("img", { class: "image", src: source, alt: label, loading: "lazy", onerror: () => figure.replaceChildren(h("p", { class: "soft" }, "There is no preview of this value.")) });
  const figure = h("figure", {}, shown);
  return figure;
}

/** Shows the beginning of a value as a table, and numbers also as a drawing; null if it is neither. */
export function picture(value) {
  if (Array.isArray(value)) {
    const shape = shapeOf(value);
    if (!shape) return colours(value);
    if (shape.length === 1) return numbers(value) ? curve(value) : null;
    return h("div", {}, numbers(value.flat()) && shape[0] > 4 && shape[1] > 4 ? heat(value, shape) : null,
      grid(["", ...value[0].map((_, index) => `#${index}`)], value.map((row, index) => [index, ...row]), shape[0], shape[1]));
  }
  const { shape, columns, rows, values, index, name } = value ?? {};
  if (!Array.isArray(shape)) return null;
  if (Array.isArray(columns) && Array.isArray(rows)) {
    return grid([...(index ? [""] : []), ...columns.map(String)], index ? rows.map((row, at) => [index[at], ...row]) : rows, shape[0], shape[1]);
  }
  if (!Array.isArray(values)) return null;
  return h("div", {}, numbers(values) && values.length > 4 ? curve(values) : null,
    grid(["", String(name ?? "value")], values.map((item, at) => [index ? index[at] : at, item]), shape[0], 1));
}

/** The lengths of a list of scalars, or of equally long lists of them; null for everything else, and for short ones. */
function shapeOf(list) {
  const scalars = row => row.every(item => item === null || typeof item !== "object");
  if (list.length > 4 && scalars(list)) return [list.length];
  const wide = list[0]?.length;
  const rectangular = list.length > 1 && wide > 1 && list.every(row => Array.isArray(row) && row.length === wide && scalars(row));
  return rectangular ? [list.length, wide] : null;
}

function grid(head, rows, high, wide) {
  const body = h("tbody", {}, ...rows.slice(0, ROWS).map(row => h("tr", {}, ...row.slice(0, COLUMNS + 1).map(cell))));
  const cut = high > Math.min(rows.length, ROWS) || wide > COLUMNS;
  return h("div", {}, h("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": "Beginning of the value" }, table(head.slice(0, COLUMNS + 1), body, "Beginning of the value")),
    cut ? h("p", { class: "soft" }, `The first ${count(Math.min(rows.length, ROWS))} of ${count(high)} rows${wide > COLUMNS ? `, and ${COLUMNS} of ${count(wide)} columns` : ""}.`) : null);
}

function range(values) {
  let [low, high] = [Infinity, -Infinity];
  for (const value of values) if (value !== null) [low, high] = [Math.min(low, value), Math.max(high, value)];
  return low > high ? [0, 0] : [low, high];
}

function curve(values) {
  const [low, high] = range(values);
  const step = Math.ceil(values.length / POINTS);
  const points = values.filter((value, index) => index % step === 0 && value !== null);
  const line = points.map((value, index) => `${((index / Math.max(1, points.length - 1)) * 100).toFixed(2)} ${(28 - ((value - low) / (high - low || 1)) * 26).toFixed(2)}`).join("L");
  const label = `${count(values.length)} numbers from ${short(low)} to ${short(high)}`;
  return h("figure", { class: "series" }, s("svg", { viewBox: "0 0 100 30", preserveAspectRatio: "none", role: "img", "aria-label": label }, s("path", { d: line && `M${line}` })), h("figcaption", { class: "soft" }, label));
}

function heat(rows, [high, wide]) {
  const [low, top] = range(rows.flat());
  const [height, width] = [Math.min(MAP, high), Math.min(MAP, wide)];
  const label = `${count(high)} × ${count(wide)} numbers from ${short(low)} (dark) to ${short(top)} (light)`;
  return drawing(width, height, label, (x, y) => {
    const value = rows[Math.floor((y * high) / height)][Math.floor((x * wide) / width)];
    if (value === null) return [0, 0, 0, 0];
    const part = (value - low) / (top - low || 1);
    return [255 * part ** 1.5, 40 + 190 * part, 110 + 60 * Math.sin(Math.PI * part), 255];
  });
}

/** Draws nested lists with three or four bytes for each pixel: an array of colours that is small enough to come whole. */
function colours(rows) {
  const shape = colourShape(rows);
  if (!shape) return null;
  const [high, wide] = shape;
  return drawing(wide, high, `${count(wide)} × ${count(high)} pixels`, (x, y) => [...rows[y][x], 255].slice(0, 4));
}

/** The lengths of such lists; null for all others. */
function colourShape(rows) {
  const [high, wide, channels] = [rows.length, rows[0]?.length, rows[0]?.[0]?.length];
  const byte = item => Number.isInteger(item) && item >= 0 && item < 256;
  const pixel = item => Array.isArray(item) && item.length === channels && item.every(byte);
  if (high < 5 || !(wide > 4) || ![3, 4].includes(channels)) return null;
  return rows.every(row => Array.isArray(row) && row.length === wide && row.every(pixel)) ? [high, wide, channels] : null;
}

function drawing(width, height, label, colour) {
  const canvas = h("canvas", { class: "heat", width, height, role: "img", "aria-label": label });
  const pen = canvas.getContext("2d");
  const pixels = pen.createImageData(width, height);
  for (let y = 0; y < height; y++) for (let x = 0; x < width; x++) pixels.data.set(colour(x, y), 4 * (y * width + x));
  pen.putImageData(pixels, 0, 0);
  return h("figure", {}, canvas, h("figcaption", { class: "soft" }, label));
}
