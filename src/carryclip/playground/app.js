// Controls, the address, and when to draw.

const $ = (id) => document.getElementById(id);

/** Round numbers from low to high, so that each step of a slider is another number. */
function ladder(low, high) {
  const rungs = [];
  for (let power = -4; power <= 1; power += 1) {
    for (const digits of [1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8]) rungs.push(Number(`${digits}e${power}`));
  }
  return rungs.filter((value) => value >= low && value <= high);
}

/** Sliders: either a ladder of numbers, or even steps. */
const SLIDERS = {
  radius: { low: 0.1, high: 20, rungs: ladder(0.1, 20) },
  lr: { low: 0.0005, high: 1, rungs: ladder(0.0005, 1) },
  momentum: { low: 0, high: 0.99, step: 0.01 },
  scale: { low: 0.1, high: 50, rungs: ladder(0.1, 50) },
  seeds: { low: 1, high: 30, step: 1 },
  steps: { low: 100, high: 5000, step: 100 },
};

/** The nearest rung; the address may have numbers between rungs. */
function toPosition({ rungs }, value) {
  if (!rungs) return value;
  const away = rungs.map((rung) => Math.abs(Math.log(rung / value)));
  return away.indexOf(Math.min(...away));
}

const toValue = ({ rungs }, position) => (rungs ? rungs[position] : Number(position));

function defaults(problem) {
  return { problem, policy: "shrunk", seeds: 10, draw: 0, ...PROBLEMS[problem].settings };
}

/** Settings from the address. What it does not have, or has wrong, is the problem's default. */
function fromHash(hash) {
  const given = new URLSearchParams(hash.replace(/^#/, ""));
  const pick = (name, table, otherwise) => (Object.hasOwn(table, given.get(name) ?? "") ? given.get(name) : otherwise);
  const settings = defaults(pick("problem", PROBLEMS, "aliasing"));
  settings.policy = pick("policy", POLICIES, settings.policy);
  settings.law = pick("law", LAWS, settings.law);
  for (const [name, { low, high, step }] of Object.entries(SLIDERS)) {
    const value = Number.parseFloat(given.get(name));
    if (!Number.isFinite(value)) continue;
    const held = Math.min(high, Math.max(low, value));
    settings[name] = step === undefined || step < 1 ? held : Math.round(held);
  }
  const draw = Number.parseInt(given.get("draw"), 10);
  if (draw >= 0 && draw < 1000) settings.draw = draw;
  return settings;
}

const toHash = (settings) => `#${new URLSearchParams(settings)}`;

let settings = fromHash(location.hash);
let known = { key: "", random: [], studies: {} };
let waiting = 0;
let written = location.hash;

/** The study of one policy at the present settings, made at most once. */
function studied(policy) {
  const { policy: _, ...rest } = settings;
  const key = JSON.stringify(rest);
  if (known.key !== key) known = { key, random: drawAll(settings), studies: {} };
  known.studies[policy] ??= study(settings, policy, known.random);
  return known.studies[policy];
}

function say(id, text) {
  if ($(id).textContent !== text) $(id).textContent = text;
}

function drawLines() {
  const now = studied(settings.policy);
  const other = studied(settings.policy === "plain" ? "none" : "plain");
  const problem = PROBLEMS[settings.problem];
  const common = { study: now, steps: settings.steps };
  lines($("iterates"), {
    ...common,
    name: "shown",
    other,
    levels: [{ value: problem.best, label: settings.problem === "regression" ? "truth" : "optimum", always: true }],
    yLabel: problem.axis,
  });
  say("iterates-words", aboutIterates(settings, now, other));
  say("mean-label", `${named(now.policy)}, mean of the runs`);
  say("other-label", `${named(other.policy)}, mean`);
  const none = settings.policy === "none";
  lines($("carry"), {
    ...common,
    name: "carry",
    levels: [],
    yLabel: "carry (radii)",
    floor: 0,
    empty: none ? "no clipping, no carry" : undefined,
  });
  say("carry-words", aboutCarry(settings, now));
  lines($("delay"), {
    ...common,
    name: "delay",
    levels: [{ value: 2, label: "harmless below 2", always: true }, { value: 10, label: "a momentum of 0.9" }],
    yLabel: "delay (steps)",
    floor: 0,
    empty: none ? "no clipping, no delay" : undefined,
  });
  say("delay-words", aboutDelay(settings, now));
}

/** The comparison of all policies, one of them at a time so that sliders stay quick. */
function drawBiases() {
  const names = Object.keys(POLICIES);
  const missing = names.find((name) => !known.studies[name]);
  if (missing !== undefined) {
    studied(missing);
    waiting = setTimeout(drawBiases, 0);
    return;
  }
  const studies = names.map((name) => known.studies[name]);
  const xLabel = settings.problem === "regression" ? "predicted ÷ true total, less 1" : "distance from the optimum";
  biases($("bias"), { studies, chosen: settings.policy, xLabel });
  say("bias-words", aboutBias(settings, studies));
  document.body.dataset.ready = toHash(settings);
}

function showControls() {
  document.querySelector(`[name=problem][value=${settings.problem}]`).checked = true;
  document.querySelector(`[name=policy][value=${settings.policy}]`).checked = true;
  $("law").value = settings.law;
  $("scale").disabled = settings.law === "off";
  for (const [name, slider] of Object.entries(SLIDERS)) {
    $(name).value = toPosition(slider, settings[name]);
    $(name).setAttribute("aria-valuetext", String(settings[name]));
    say(`${name}-value`, String(settings[name]));
  }
  say("about", PROBLEMS[settings.problem].about);
  say("policy-about", POLICIES[settings.policy].about);
  const { code, note } = aboutCode(settings);
  say("code", code);
  say("note", note);
}

function draw() {
  clearTimeout(waiting);
  delete document.body.dataset.ready;
  drawLines();
  waiting = setTimeout(drawBiases, 60);
}

function changed() {
  written = toHash(settings);
  history.replaceState(null, "", written);
  showControls();
  draw();
}

function radios(id, name, table) {
  for (const [value, { label }] of Object.entries(table)) {
    const input = Object.assign(document.createElement("input"), { type: "radio", name, value, id: `${name}-${value}` });
    const text = Object.assign(document.createElement("label"), { htmlFor: input.id, textContent: label });
    input.addEventListener("change", () => {
      // Another problem brings its own numbers.
      if (name === "problem") settings = { ...defaults(value), policy: settings.policy, seeds: settings.seeds };
      else settings = { ...settings, [name]: value };
      changed();
    });
    $(id).append(input, text);
  }
}

function start() {
  radios("problems", "problem", PROBLEMS);
  radios("policies", "policy", POLICIES);
  for (const [value, { label }] of Object.entries(LAWS)) $("law").append(new Option(label, value));
  $("law").addEventListener("change", () => {
    settings.law = $("law").value;
    changed();
  });
  for (const [name, slider] of Object.entries(SLIDERS)) {
    const { rungs, low, high, step } = slider;
    const ends = rungs ? { min: 0, max: rungs.length - 1, step: 1 } : { min: low, max: high, step };
    Object.assign($(name), ends);
    $(name).addEventListener("input", () => {
      settings[name] = toValue(slider, $(name).value);
      changed();
    });
  }
  $("again").addEventListener("click", () => {
    settings.draw = (settings.draw + 1) % 1000;
    changed();
  });
  $("reset").addEventListener("click", () => {
    settings = defaults(settings.problem);
    changed();
  });
  addEventListener("hashchange", () => {
    if (location.hash === written) return;
    settings = fromHash(location.hash);
    changed();
  });
  new ResizeObserver(draw).observe($("pictures"));
  changed();
}

start();
