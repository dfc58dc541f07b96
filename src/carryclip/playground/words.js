// The sentence under each picture: what one sees now.

const NEAR = 0.05; // as far off as nobody would care about
const ASTRAY = 0.25; // a mean that is known no better than this says little
const WIDE = 1; // a swing of this standard deviation is as large as the problems themselves

/** A number with as many digits as mean something. */
function figure(x) {
  const size = Math.abs(x);
  if (!Number.isFinite(x)) return "–";
  if (size >= 1e5) return x.toExponential(1);
  if (size >= 100) return x.toFixed(0);
  return size >= 10 ? x.toFixed(1) : x.toFixed(2);
}

const percent = (x) => `${(100 * x).toFixed(0)} %`;
const listed = (names) => (names.length < 2 ? names.join("") : `${names.slice(0, -1).join(", ")} and ${names.at(-1)}`);
const named = (name) => (name === "none" ? "No clipping" : POLICIES[name].label);
const atBest = (study) => study.error <= ASTRAY && Math.abs(study.bias) <= Math.max(NEAR, 2 * study.error);

const swings = (study) => study.swing > WIDE;
const extent = (settings, x) => (settings.problem === "regression" ? percent(x) : figure(x));

/** Where a policy ends: "1.25 to the left of the optimum". */
function place(settings, study) {
  const spread = settings.seeds > 1 ? ` ± ${figure(2 * study.error)}` : "";
  if (settings.problem === "regression") {
    const share = 1 + study.bias;
    const apart = settings.seeds > 1 ? ` ± ${(200 * study.error).toFixed(0)}` : "";
    return `${(100 * share).toFixed(0)}${apart} % of the true total`;
  }
  if (atBest(study)) return `the optimum, to within ${figure(Math.abs(study.bias))}${spread}`;
  return `${figure(Math.abs(study.bias))}${spread} to the ${study.bias < 0 ? "left" : "right"} of the optimum`;
}

function aboutIterates(settings, study, other) {
  const name = named(study.policy);
  if (study.runs.length === 0) return `${name}: every run diverges. Try a smaller learning rate or momentum.`;
  const at = settings.problem === "regression" || atBest(study) ? " at" : "";
  let verb = `settles${at}`;
  const moving = Math.abs(study.moved) > Math.max(0.1, 3 * study.movedError) && settings.seeds > 1;
  if (moving) verb = `is still moving; on average it is${at}`;
  if (swings(study)) verb = `does not settle: it swings by ±${extent(settings, study.swing)}, and on average it is${at}`;
  if (study.error > ASTRAY) verb = `does not settle: runs differ widely, and on average it is${at}`;
  let said = `${name} ${verb} ${place(settings, study)}.`;
  if (study.diverged > 0) said += ` ${study.diverged} of ${settings.seeds} runs diverged and are left out.`;
  if (other && other.runs.length > 0) said += ` ${named(other.policy)}: ${place(settings, other)}.`;
  return said;
}

function aboutCarry(settings, study) {
  const { policy, carry, largest } = study;
  if (study.runs.length === 0) return "Every run diverges.";
  if (policy === "none") return "Nothing is clipped, so nothing is carried.";
  if (policy === "plain") {
    return `Plain clipping keeps nothing. It cuts ${percent(study.clipped)} of the gradients, and what it cuts is lost.`;
  }
  if (policy === "shrunk") {
    return `The carry is an estimate of clipping's bias, ${figure(carry)} radii on average over the second half. ` +
      "It is added to every step, as far as it stands out of its noise.";
  }
  if (policy === "drip") {
    return `On average ${figure(carry)} radii are owed over the second half, and 3 % of that is paid in a step. ` +
      "The carry is held within 33.3 radii.";
  }
  let said = `On average ${figure(carry)} radii wait over the second half; at most it was ${figure(largest)}.`;
  const cap = POLICIES[policy].cap ?? POLICIES[policy].radii;
  if (cap !== undefined) said += ` The carry is held within ${cap} radii.`;
  if (policy === "full" && growing(study)) said += " It keeps growing: gradients feed it faster than the radius pays.";
  return said;
}

/** Whether the carry grows from quarter to quarter, to more than 10 radii; mere fluctuations do not count. */
function growing(study) {
  const curve = meanCurve(study.runs, "carry");
  const quarter = (k) => mean(curve.slice((k * curve.length) / 4, ((k + 1) * curve.length) / 4));
  const [second, third, last] = [quarter(1), quarter(2), quarter(3)];
  return last > 10 && last > third && third > second && last > 2 * second;
}

function aboutDelay(settings, study) {
  const { policy, delay } = study;
  if (study.runs.length === 0) return "Every run diverges.";
  if (policy === "none") return "Without a radius nothing waits: SGD receives every gradient as it is.";
  if (policy === "plain") return "Nothing waits, because what is cut is lost. The delay is 1 at most.";
  if (!POLICIES[policy].hasty) {
    return `${named(policy)} clips each gradient by itself and adds a little of the carry, so that gradients need not ` +
      `wait. The delay is ${figure(delay)} on average over the second half.`;
  }
  const steps = `On average over the second half a gradient waits about ${figure(delay)} steps`;
  if (delay < 2) return `${steps}. Below 2 that is harmless.`;
  if (delay >= 100) return `${steps}: what is sent is about points long left behind.`;
  const second = `like a momentum of ${(1 - 1 / delay).toFixed(2)}`;
  return `${steps}, ${second}${settings.momentum > 0 ? ` on top of SGD's own ${settings.momentum}` : ""}.`;
}

function aboutBias(settings, studies) {
  const known = studies.filter((study) => study.runs.length > 0);
  if (known.length === 0) return "Every run of every policy diverges.";
  const sorted = [...known].sort((a, b) => Math.abs(a.bias) - Math.abs(b.bias));
  const near = known.filter(atBest).map((study) => named(study.policy));
  const worst = sorted.at(-1);
  const first = near.length > 0
    ? `On average at the optimum, as far as these runs can tell: ${listed(near)}.`
    : `None is at the optimum. Nearest: ${named(sorted[0].policy)}, ${place(settings, sorted[0])}.`;
  const last = atBest(worst) ? "" : ` Farthest off: ${named(worst.policy)}, ${place(settings, worst)}.`;
  const wide = known.filter(swings).map((study) => named(study.policy));
  const lost = studies.filter((study) => study.diverged > 0).map((study) => named(study.policy));
  let said = first + last;
  if (wide.length > 0) said += ` Swinging widely: ${listed(wide)}.`;
  if (lost.length > 0) said += ` Runs of ${listed(lost)} diverged.`;
  return said;
}

/** The Python that does the same, and what the library has to say of it. */
function aboutCode(settings) {
  const momentum = settings.momentum > 0 ? `, momentum=${settings.momentum}` : "";
  const optimizer = `optimizer = torch.optim.SGD(model.parameters(), lr=${settings.lr}${momentum})`;
  const policy = POLICIES[settings.policy];
  if (settings.policy === "none") return { code: optimizer, note: "No clipping. Where training is stable, this is best." };
  const carry = policy.code ? `, ${policy.code}` : "";
  let note = "";
  if (policy.standard) note = "This is the default carry: leave carry= out.";
  if (policy.hasty) {
    note = settings.momentum > 0
      ? "The library warns of this line: a carry that pays at once often trains networks far worse in front of momentum or Adam. Leave carry= out."
      : "For SGD without momentum only: in front of momentum or Adam, leave carry= out.";
  }
  return { code: `${optimizer}\nclipper = UClip(optimizer, Norm(${settings.radius})${carry})`, note };
}
