// Random numbers, noise laws and the three problems. Laws and the first two problems are those of carryclip.theory.

/** Uniform numbers in [0, 1) from a seed (mulberry32): the same seed draws the same picture everywhere. */
function generator(seed) {
  let state = Math.imul(seed + 1, 0x9e3779b1) >>> 0;
  return () => {
    state = (state + 0x6d2b79f5) >>> 0;
    let t = Math.imul(state ^ (state >>> 15), state | 1);
    t ^= t + Math.imul(t ^ (t >>> 7), t | 61);
    return ((t ^ (t >>> 14)) >>> 0) / 4294967296;
  };
}

const gaussian = (random) => Math.sqrt(-2 * Math.log(1 - random())) * Math.cos(2 * Math.PI * random());

/** Laws of mean 0, for a scale of 1. */
const LAWS = {
  off: { label: "none", draw: () => 0 },
  gaussian: { label: "normal", draw: gaussian },
  uniform: { label: "uniform", draw: (random) => 2 * random() - 1 },
  coin: { label: "fair coin, ±1", draw: (random) => (random() < 0.5 ? -1 : 1) },
  student: {
    label: "Student t, 3 degrees (heavy on both sides)",
    draw: (random) => {
      const z = gaussian(random);
      const chiSq = gaussian(random) ** 2 + gaussian(random) ** 2 + gaussian(random) ** 2;
      return z / Math.sqrt(chiSq / 3);
    },
  },
  rare: { label: "rare, 1 in 20 is large (skewed)", draw: (random) => (random() < 0.05 ? 0.95 : -0.05) },
  skewed: { label: "lognormal, shape 1.5 (very skewed)", draw: (r) => Math.exp(1.5 * gaussian(r)) - Math.exp(1.125) },
};

/**
 * A problem has a start, a best point, the gradient of one example (from uniform numbers `coin` and `place`, and one
 * number of noise), and what the pictures show of a point: one number, whose best value is 0 off.
 */
const PROBLEMS = {
  aliasing: {
    label: "Aliasing pair",
    about: "|4x − 1| one time in four, |x + 1| otherwise. The best x is ¼. Clipped to 2, the large gradients shrink " +
      "and the small ones do not, and the clipped gradients are those of a problem whose best x is −1.",
    start: [2],
    gradient: ([x], { coin, noise }) => [(coin < 0.25 ? 4 * Math.sign(4 * x - 1) : Math.sign(x + 1)) + noise],
    shown: ([x]) => x,
    best: 0.25,
    axis: "iterate x",
    settings: { radius: 2, lr: 0.005, momentum: 0, law: "off", scale: 1, steps: 4000 },
  },
  quadratics: {
    label: "Two quadratics",
    about: "(x − 3)²/2 or (x + 3)²/2, one as often as the other. The best x is 0. Clipped to 1, both gradients are " +
      "±1 everywhere between −2 and 2, and nothing pulls to 0.",
    start: [1.5],
    gradient: ([x], { coin, noise }) => [x + (coin < 0.5 ? 3 : -3) + noise],
    shown: ([x]) => x,
    best: 0,
    axis: "iterate x",
    settings: { radius: 1, lr: 0.01, momentum: 0, law: "off", scale: 1, steps: 3000 },
  },
  regression: {
    label: "Skewed regression",
    about: "A straight line through amounts: y = 2 + z + noise, with z even on [−1, 1], squared error, one example " +
      "a step. Under the rare law most amounts are small and one in twenty is large, as claims and sales are. " +
      "Shown is the predicted total over the true one.",
    start: [0, 0],
    gradient: ([intercept, slope], { place, noise }) => {
      const z = 2 * place - 1;
      const error = intercept + slope * z - (2 + z + noise);
      return [error, error * z];
    },
    shown: ([intercept]) => intercept / 2,
    best: 1,
    axis: "predicted ÷ true total",
    settings: { radius: 2, lr: 0.005, momentum: 0, law: "rare", scale: 40, steps: 4000 },
  },
};
