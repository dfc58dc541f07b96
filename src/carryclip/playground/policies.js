// The algorithm under a norm, in float64: carryclip.reference.UClip(Norm(radius), carry=...) line by line.
// A test feeds both the same gradients and compares updates and carry.

const norm = (v) => Math.sqrt(v.reduce((sum, x) => sum + x * x, 0));
const inner = (v, w) => v.reduce((sum, x, i) => sum + x * w[i], 0);
const scaled = (v, factor) => v.map((x) => x * factor);
const plus = (v, w) => v.map((x, i) => x + w[i]);
const minus = (v, w) => v.map((x, i) => x - w[i]);

/** A debiased exponential average. */
class Average {
  n = 0;
  value = 0;

  add(x, decay) {
    this.n += 1;
    this.value = decay * this.value + (1 - decay) * x;
    return this.value / (1 - decay ** this.n);
  }
}

/** What becomes of the part that is cut. `code` is what one writes in Python, `hasty` pays all of it back at once. */
const POLICIES = {
  none: { label: "No clipping", about: "SGD receives every gradient as it is." },
  plain: { label: "Plain clipping", about: "What is cut is lost.", code: "carry=False" },
  full: {
    label: "carry=True",
    about: "The paper's U-Clip: all that is cut waits, and is paid as fast as the radius allows.",
    code: "carry=True",
    hasty: true,
  },
  gated: {
    label: "Gated()",
    about: "As carry=True, but the carry stops growing while gradients keep feeding it, and at 100 radii.",
    code: "carry=Gated()",
    hasty: true,
    decay: 0.99,
    threshold: 0.5,
    cap: 100,
  },
  capped: {
    label: "Capped(10)",
    about: "As carry=True, but the carry is held within 10 radii.",
    code: "carry=Capped(10)",
    hasty: true,
    radii: 10,
  },
  drip: {
    label: "Drip()",
    about: "Plain clipping, moved a little toward what is owed: 3 % of the debt is paid in a step.",
    code: "carry=Drip()",
    rate: 0.03,
    decay: 0.99,
  },
  shrunk: {
    label: "Shrunk()",
    about: "The default: plain clipping, plus the average of what it cuts, as far as that stands out of its noise.",
    code: "",
    memory: 100,
    standard: true,
  },
};

class Clipper {
  constructor(name, radius) {
    this.name = name;
    this.policy = POLICIES[name];
    this.radius = radius;
    this.carry = null;
    this.feed = new Average();
    this.factors = new Average();
    this.noiseSq = 0;
  }

  /** The update for gradient g; `delay` and `carry` are those after the step. */
  step(g) {
    if (this.carry === null) this.carry = g.map(() => 0);
    let done;
    if (this.name === "none") done = { total: g, update: g, carry: this.carry };
    else if (this.name === "drip") done = this.drip(g);
    else if (this.name === "shrunk") done = this.shrunk(g);
    else done = this.atOnce(g);
    this.carry = done.carry;
    // What is clipped waits as far as it is kept.
    const waiting = Math.min(norm(done.total), norm(done.update) + norm(done.carry));
    this.delay = waiting / this.radius;
    return done.update;
  }

  /** Plain clipping, the full carry, Gated and Capped: all that is carried is paid as fast as the radius allows. */
  atOnce(g) {
    const total = plus(g, this.carry); //                                       g_t + carry_t
    const size = norm(total);
    const scale = size <= this.radius ? 1 : this.radius / size;
    const cut = size <= this.radius ? 0 : size - this.radius;
    const update = scaled(total, scale); //                                     u_t = clip(g_t + carry_t, radius)
    const keep = this.share(g, cut);
    return { total, update, carry: scaled(minus(total, update), keep) }; //     carry_{t+1} = g_t + carry_t - u_t
  }

  /** The part of what is cut that is carried. */
  share(g, cut) {
    if (this.name === "plain") return 0;
    if (this.name === "full") return 1;
    let limit = this.policy.radii * this.radius;
    if (this.name === "gated") {
      const owed = norm(this.carry);
      const fed = owed > 0 ? inner(g, this.carry) / (this.radius * owed) : 0;
      const average = this.feed.add(Math.min(1, Math.max(-1, fed)), this.policy.decay);
      limit = this.policy.cap * this.radius;
      if (average >= this.policy.threshold) limit = Math.min(limit, owed);
    }
    return cut > 0 ? Math.min(1, limit / cut) : 1;
  }

  /** What plain clipping multiplies g with, and what it usually does. */
  factor(g, decay) {
    const size = norm(g);
    const a = size > this.radius ? this.radius / size : 1;
    const past = this.factors;
    const usual = past.n > 0 ? 1 - past.value / (1 - decay ** past.n) : a;
    past.add(1 - a, decay);
    return { a, usual, size };
  }

  within(v) {
    const size = norm(v);
    return size > this.radius ? scaled(v, this.radius / size) : v;
  }

  drip(g) {
    const { rate, decay } = this.policy;
    const { a, usual } = this.factor(g, decay);
    const base = scaled(g, a);
    const owed = plus(this.carry, scaled(g, usual));
    const total = plus(base, scaled(minus(owed, base), rate));
    const update = this.within(total);
    const rest = minus(owed, update);
    const limit = this.radius / rate;
    const left = norm(rest);
    return { total, update, carry: left > limit ? scaled(rest, limit / left) : rest };
  }

  shrunk(g) {
    const { memory } = this.policy;
    const rho = 1 / memory;
    const { a, usual } = this.factor(g, 1 - rho);
    const biasSq = inner(this.carry, this.carry);
    const standsOut = biasSq > 0 ? Math.max(0, 1 - this.noiseSq / biasSq) : 0;
    const total = plus(scaled(g, a), scaled(this.carry, standsOut));
    const update = this.within(total);
    let cut = minus(plus(scaled(g, usual), scaled(this.carry, standsOut)), update);
    const limit = this.radius / rho;
    if (norm(cut) > limit) cut = scaled(cut, limit / norm(cut));
    let carry = plus(scaled(this.carry, 1 - rho), scaled(cut, rho));
    this.noiseSq = (1 - rho) ** 2 * this.noiseSq + rho ** 2 * inner(cut, cut);
    const most = 3 * this.radius;
    if (norm(carry) > most) {
      this.noiseSq *= (most / norm(carry)) ** 2;
      carry = scaled(carry, most / norm(carry));
    }
    return { total, update, carry };
  }
}
