// One run is SGD, with momentum as PyTorch has it, on clipped gradients. All policies see the same random numbers.

const DIVERGED = 1e6;
const POINTS = 240; // of a curve, whatever the number of steps

/** The random numbers of one run. */
function draws(settings, seed) {
  const random = generator(1000 * settings.draw + seed);
  const law = LAWS[settings.law];
  const made = [];
  for (let t = 0; t < settings.steps; t += 1) {
    made.push({ coin: random(), place: random(), noise: settings.scale * law.draw(random) });
  }
  return made;
}

/**
 * One run: curves of what is shown, of carry and delay in radii; means and variance over the second half, and how
 * far the mean of its later part has `moved` from that of the part `before`.
 */
function run(settings, policy, random) {
  const problem = PROBLEMS[settings.problem];
  const clipper = new Clipper(policy, settings.radius);
  const every = Math.max(1, Math.floor(settings.steps / POINTS));
  const half = Math.floor(settings.steps / 2);
  const curves = { step: [0], shown: [problem.shown(problem.start)], carry: [0], delay: [0] };
  const sums = { shown: 0, square: 0, before: 0, carry: 0, delay: 0, clipped: 0 };
  let x = [...problem.start];
  let velocity = x.map(() => 0);
  let largest = 0;
  let diverged = false;
  for (let t = 0; t < settings.steps && !diverged; t += 1) {
    const g = problem.gradient(x, random[t]);
    const update = clipper.step(g);
    velocity = plus(scaled(velocity, settings.momentum), update);
    x = minus(x, scaled(velocity, settings.lr));
    diverged = !x.every((value) => Math.abs(value) < DIVERGED);
    const shown = problem.shown(x);
    const carry = norm(clipper.carry) / settings.radius;
    largest = Math.max(largest, carry);
    if (norm(g) > settings.radius) sums.clipped += 1 / settings.steps;
    if (t >= half) {
      const weight = 1 / (settings.steps - half);
      sums.shown += shown * weight;
      sums.square += shown * shown * weight;
      sums.carry += carry * weight;
      sums.delay += clipper.delay * weight;
      if (t < (half + settings.steps) / 2) sums.before += shown * weight * 2;
    }
    if ((t + 1) % every === 0) {
      curves.step.push(t + 1);
      curves.shown.push(shown);
      curves.carry.push(carry);
      curves.delay.push(clipper.delay);
    }
  }
  const after = 2 * sums.shown - sums.before;
  const variance = Math.max(0, sums.square - sums.shown ** 2);
  return { curves, diverged, largest, ...sums, variance, moved: after - sums.before, last: x };
}

const mean = (values) => values.reduce((sum, x) => sum + x, 0) / values.length;

/** The standard error of the mean; 0 for one value, which says nothing. */
function standardError(values) {
  if (values.length < 2) return 0;
  const centre = mean(values);
  const variance = values.reduce((sum, x) => sum + (x - centre) ** 2, 0) / (values.length - 1);
  return Math.sqrt(variance / values.length);
}

/** All seeds under one policy. `bias` is how far what is shown is from its best value, over the second half. */
function study(settings, policy, random) {
  const problem = PROBLEMS[settings.problem];
  const runs = random.map((numbers) => run(settings, policy, numbers));
  const sound = runs.filter((each) => !each.diverged);
  const away = sound.map((each) => each.shown - problem.best);
  const of = (name) => (sound.length ? mean(sound.map((each) => each[name])) : NaN);
  return {
    policy,
    runs: sound,
    diverged: runs.length - sound.length,
    away,
    bias: sound.length ? mean(away) : NaN,
    error: standardError(away),
    swing: Math.sqrt(of("variance")),
    moved: of("moved"),
    movedError: standardError(sound.map((each) => each.moved)),
    carry: of("carry"),
    delay: of("delay"),
    clipped: of("clipped"),
    largest: sound.length ? Math.max(...sound.map((each) => each.largest)) : NaN,
  };
}

/** The random numbers of all runs. */
function drawAll(settings) {
  return Array.from({ length: settings.seeds }, (_, seed) => draws(settings, seed));
}
