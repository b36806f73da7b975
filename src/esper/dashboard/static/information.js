"use strict";
// Which lines of a chart tell something: neither a constant nor a straight line is drawn.

const SAME = 1e-6; // of its size: numbers come with seven digits
const STRAIGHT = 0.05; // of its range: so far may a straight line's points lie beside it
const FEWEST_OF_LINE = 5; // fewer points may lie on one line by chance

function shapeOf(x, y) {
  const points = x.map((at, row) => [at, y[row]]).filter(([, value]) => isKnown(value));
  const values = points.map(([, value]) => value);
  const low = Math.min(...values);
  const high = Math.max(...values);
  if (high - low <= SAME * Math.max(Math.abs(low), Math.abs(high))) return "constant";
  if (points.length < FEWEST_OF_LINE) return "line";
  const [x0, y0] = points[0];
  const [x1, y1] = points.at(-1);
  const expected = (at) => y0 + ((y1 - y0) * (at - x0)) / (x1 - x0);
  const isNear = ([at, value]) => Math.abs(value - expected(at)) <= STRAIGHT * (high - low);
  return points.every(isNear) ? "straight" : "line";
}

// A chart's series, those that are drawn and those that are only named. A reference, such as the
// twin, is drawn beside any line, because the distance from it tells something.
function partedByInformation({ x, series }) {
  const measured = series.filter(({ y }) => y?.some(isKnown));
  const shapes = new Map(measured.map((line) => [line, shapeOf(x, line.y)]));
  const hasLine = measured.some((line) => shapes.get(line) === "line");
  const isDrawn = (line) =>
    shapes.get(line) === "line" || (hasLine && Boolean(line.isReference));
  return {
    drawn: measured.filter(isDrawn),
    named: measured.filter((line) => !isDrawn(line)).map((line) =>
      ({ ...line, shape: shapes.get(line) })),
  };
}

// A series that is not drawn, in words.
function namedWords({ title, format }, { label, y, shape }) {
  const name = `${title.toLowerCase()}, ${label}`;
  if (shape === "constant") return `${name}: ${format(lastOf(y))}`;
  return `${name}: from ${format(y.find(isKnown))} to ${format(lastOf(y))} in a straight line`;
}
