"use strict";
// Round numbers for axes: 1, 2 and 5 times a power of ten.

const ROUND_STEPS = Array.from({ length: 31 }, (_, index) => 10 ** (index - 15))
  .flatMap((power) => [power, 2 * power, 5 * power])
  .map((step) => Number(step.toPrecision(1)));

const roundStep = (wanted) => ROUND_STEPS.find((step) => step >= wanted * (1 - 1e-9));

// The round numbers in a range, at most about so many.
function roundTicks(low, high, most) {
  const step = roundStep((high - low) / Math.max(1, most)) ?? (high - low);
  if (!(step > 0)) return [low];
  const first = Math.ceil(low / step - 1e-9);
  const last = Math.floor(high / step + 1e-9);
  return Array.from({ length: last - first + 1 }, (_, index) =>
    Number(((first + index) * step).toPrecision(12)));
}
