"use strict";
// Everything the page does. Text from the data goes into the page as text, never as markup.
(() => {
  const $ = (id) => document.getElementById(id);
  const data = JSON.parse($("data").textContent);
  const make = (tag, text, given) => Object.assign(document.createElement(tag), text === undefined ? {} : { textContent: text }, given);
  const many = (count) => count.toLocaleString("en-US");

  // ---------------------------------------------------------------- the address keeps what is chosen: #show?key=value
  const asked = new URLSearchParams(location.hash.startsWith("#show?") ? location.hash.slice(6) : "");
  let ready = false;
  const remember = () => {
    if (!ready) return; // while the page is made, the address is read, not written
    const told = new URLSearchParams();
    for (const chip of chips) if (chip.getAttribute("aria-pressed") === "true") told.append("claims", chip.dataset.verdict);
    if ($("runs-table")) {
      const text = $("runs-text").value.trim();
      if (text) told.set("text", text);
      for (const [name, only] of Object.entries(state.only)) told.set(name, String(only));
      if (state.sort) told.set("sort", (state.down ? "-" : "") + state.sort);
    }
    history.replaceState(null, "", told.size ? `#show?${told}` : location.pathname + location.search);
  };

  // ---------------------------------------------------------------- claims by verdict
  const chips = [...document.querySelectorAll(".chip")];
  const claims = [...document.querySelectorAll(".claims tbody tr")];
  const showClaims = () => {
    const wanted = new Set(chips.filter((chip) => chip.getAttribute("aria-pressed") === "true").map((chip) => chip.dataset.verdict));
    let shown = 0;
    for (const row of claims) {
      row.hidden = wanted.size > 0 && !wanted.has(row.dataset.verdict);
      shown += !row.hidden;
    }
    $("claims-count").textContent = `${shown} of ${claims.length} lines`;
    if (wanted.has("not run at this size") && $("waiting")) $("waiting").open = true;
    remember();
  };
  for (const chip of chips) {
    const count = claims.filter((row) => row.dataset.verdict === chip.dataset.verdict).length;
    chip.append(` (${count})`);
    chip.setAttribute("aria-pressed", String(asked.getAll("claims").includes(chip.dataset.verdict)));
    chip.addEventListener("click", () => {
      chip.setAttribute("aria-pressed", String(chip.getAttribute("aria-pressed") !== "true"));
      showClaims();
    });
  }
  if (chips.length) showClaims();

  // ---------------------------------------------------------------- saving what the page holds
  const save = (name, type, text) => {
    const address = URL.createObjectURL(new Blob([text], { type }));
    const link = make("a", undefined, { href: address, download: name });
    document.body.append(link);
    link.click();
    link.remove();
    setTimeout(() => URL.revokeObjectURL(address), 10000);
  };
  const cell = (value) => {
    const text = value === null || value === undefined ? "" : String(value);
    return /[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  };
  const csv = (columns, rows) => [columns, ...rows].map((row) => row.map(cell).join(",")).join("\r\n") + "\r\n";
  const picture = (anchor) => atob(document.getElementById(anchor).querySelector("img").src.split(",")[1]);
  document.addEventListener("click", (event) => {
    const button = event.target.closest("[data-save]");
    if (!button) return;
    const anchor = button.dataset.figure;
    if (button.dataset.save === "picture") {
      const bytes = Uint8Array.from(picture(anchor), (letter) => letter.charCodeAt(0));
      save(`${anchor}.svg`, "image/svg+xml", bytes);
    } else if (button.dataset.save === "numbers") {
      save(`${anchor}.csv`, "text/csv", csv(data.figures[anchor].columns, data.figures[anchor].rows));
    } else if (button.dataset.save === "runs-csv") {
      save("runs.csv", "text/csv", csv(names, chosen.map((row) => names.map((name) => value(name, row)))));
    } else {
      save("report.json", "application/json", JSON.stringify(data));
    }
  });

  // ---------------------------------------------------------------- the table of runs, one page of rows at a time
  const PAGE = 100;
  const columns = Object.fromEntries(data.runs.columns.map((column) => [column.name, column]));
  const names = data.runs.columns.map((column) => column.name);
  const value = (name, row) => {
    const column = columns[name];
    return column.words ? column.words[column.places[row]] : column.values[row];
  };
  const all = Array.from({ length: data.runs.length }, (_, row) => row);
  const state = { sort: null, down: false, page: 0, only: {} };
  let chosen = all;
  let texts = null;

  const search = (wanted) => {
    texts ??= all.map((row) => names.map((name) => value(name, row) ?? "").join("\u0001").toLowerCase());
    const parts = wanted.toLowerCase().split(/\s+/).filter(Boolean);
    return (row) => parts.every((part) => texts[row].includes(part));
  };
  const before = (one, other) => {
    if (one === other) return 0;
    if (one === null || one === "") return 1; // what is not known comes last
    if (other === null || other === "") return -1;
    return one < other ? -1 : 1;
  };
  const choose = () => {
    const wanted = $("runs-text").value.trim();
    let rows = all;
    for (const [name, only] of Object.entries(state.only)) {
      rows = rows.filter((row) => value(name, row) === only);
    }
    if (wanted) rows = rows.filter(search(wanted));
    if (state.sort) {
      const sign = state.down ? -1 : 1;
      const known = (row) => value(state.sort, row) ?? null;
      rows = rows.slice().sort((a, b) => {
        const [one, other] = [known(a), known(b)];
        const missing = one === null || one === "" || other === null || other === "";
        return (missing ? 1 : sign) * before(one, other) || a - b;
      });
    }
    chosen = rows;
    state.page = 0;
    showRuns();
    remember();
  };
  const showRuns = () => {
    const last = Math.max(0, Math.ceil(chosen.length / PAGE) - 1);
    state.page = Math.min(Math.max(state.page, 0), last);
    const from = state.page * PAGE;
    const body = document.createDocumentFragment();
    for (const row of chosen.slice(from, from + PAGE)) {
      const line = make("tr");
      for (const name of names) {
        const what = value(name, row);
        const place = make("td", what ?? "");
        if (typeof what === "number") place.className = "number";
        if (name === "message" && what) Object.assign(place, { className: "message", title: what });
        line.append(place);
      }
      body.append(line);
    }
    $("runs-table").tBodies[0].replaceChildren(body);
    $("runs-count").textContent = `${many(chosen.length)} of ${many(all.length)} runs`;
    $("runs-page").textContent = chosen.length ? `rows ${many(from + 1)} to ${many(Math.min(from + PAGE, chosen.length))}` : "no rows";
    $("runs-back").disabled = state.page === 0;
    $("runs-on").disabled = state.page === last;
  };
  const mark = (head, button, name) => {
    for (const other of head.parentNode.children) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", state.down ? "descending" : "ascending");
    for (const other of head.parentNode.querySelectorAll("button")) other.textContent = other.textContent.replace(/ [▲▼]$/, "");
    button.textContent = `${name} ${state.down ? "▼" : "▲"}`;
  };
  const startRuns = () => {
    for (const name of names) {
      const head = make("th", undefined, { scope: "col" });
      const button = make("button", name, { type: "button" });
      button.addEventListener("click", () => {
        [state.sort, state.down] = [name, state.sort === name && !state.down];
        mark(head, button, name);
        choose();
      });
      const wanted = asked.get("sort") ?? "";
      if (wanted === name || wanted === `-${name}`) [state.sort, state.down] = [name, wanted !== name];
      head.append(button);
      $("runs-table").tHead.rows[0].append(head);
      if (state.sort === name) mark(head, button, name);
    }
    for (const name of ["study", "data", "optimizer", "method", "region", "batch", "outcome"]) {
      const column = columns[name];
      const options = column.words ? [...column.words] : [...new Set(column.values)].sort((a, b) => a - b);
      if (options.length < 2) continue;
      const select = make("select", undefined, { id: `runs-${name}` });
      select.append(make("option", "all", { value: "" }));
      for (const [number, option] of options.entries()) select.append(make("option", option === "" ? "(none)" : String(option), { value: String(number) }));
      select.addEventListener("change", () => {
        if (select.value === "") delete state.only[name];
        else state.only[name] = options[Number(select.value)];
        choose();
      });
      const given = options.findIndex((option) => asked.get(name) === String(option));
      if (given >= 0) {
        select.value = String(given);
        state.only[name] = options[given];
      }
      const label = make("label", name);
      label.append(select);
      $("runs-selects").append(label);
    }
    $("runs-text").value = asked.get("text") ?? "";
    let waiting = 0;
    $("runs-text").addEventListener("input", () => {
      clearTimeout(waiting);
      waiting = setTimeout(choose, 120);
    });
    const form = document.querySelector(".filters");
    form.addEventListener("submit", (event) => event.preventDefault());
    form.addEventListener("reset", () => setTimeout(() => {
      state.only = {};
      choose();
    }));
    $("runs-back").addEventListener("click", () => { state.page -= 1; showRuns(); });
    $("runs-on").addEventListener("click", () => { state.page += 1; showRuns(); });
    choose();
  };
  if ($("runs-table")) startRuns();
  ready = true;
  if ([...asked.keys()].length) $(asked.has("claims") ? "claims" : "runs")?.scrollIntoView();

  // ---------------------------------------------------------------- which part of the page one is in
  const links = [...document.querySelectorAll("nav a")];
  const parts = links.map((link) => document.getElementById(link.hash.slice(1)));
  const follow = () => {
    const passed = parts.filter((part) => part && part.getBoundingClientRect().top < 120).pop();
    for (const [place, link] of links.entries()) {
      if (parts[place] && parts[place] === passed) link.setAttribute("aria-current", "true");
      else link.removeAttribute("aria-current");
    }
  };
  addEventListener("scroll", follow, { passive: true });
  follow();

  // ---------------------------------------------------------------- panels below each other where there is little room
  const narrow = matchMedia("(max-width: 46rem)");
  const inPart = (image, [left, top, width, height], share) => {
    const [whole, tall] = [image.width, image.height].map((size) => (size * 3) / 4); // in points, as the boxes are
    const part = make("span");
    part.style.width = `${100 * share}%`;
    part.style.aspectRatio = `${width} / ${height}`;
    const copy = make("img", undefined, { src: image.src, alt: "" });
    copy.style.width = `${(100 * whole) / width}%`;
    copy.style.height = `${(100 * tall) / height}%`;
    copy.style.left = `${(-100 * left) / width}%`;
    copy.style.top = `${(-100 * top) / height}%`;
    part.append(copy);
    return part;
  };
  const stack = () => {
    for (const image of document.querySelectorAll("img[data-strips]")) {
      for (const old of image.parentNode.querySelectorAll(".strip")) old.remove();
      image.hidden = narrow.matches;
      if (!narrow.matches) continue;
      for (const boxes of JSON.parse(image.dataset.strips)) {
        const line = make("span", undefined, { className: "strip" });
        const wide = boxes.reduce((sum, box) => sum + box[2], 0);
        line.append(...boxes.map((box) => inPart(image, box, box[2] / wide)));
        image.parentNode.append(line);
      }
    }
  };
  narrow.addEventListener("change", stack);
  stack();

  // ---------------------------------------------------------------- looking closer at a figure
  const dialog = $("zoom");
  const stage = $("zoom-stage");
  const image = stage.querySelector("img");
  const view = { scale: 1, x: 0, y: 0, width: 1, height: 1 };
  const place = () => {
    image.style.width = `${view.width * view.scale}px`;
    image.style.transform = `translate(${view.x}px, ${view.y}px)`;
  };
  const fit = () => {
    const box = stage.getBoundingClientRect();
    view.scale = Math.min(box.width / view.width, box.height / view.height) * 0.98;
    view.x = (box.width - view.width * view.scale) / 2;
    view.y = (box.height - view.height * view.scale) / 2;
    place();
  };
  const zoom = (factor, x, y) => {
    const box = stage.getBoundingClientRect();
    const [at, down] = [x ?? box.width / 2, y ?? box.height / 2];
    const scale = Math.min(Math.max(view.scale * factor, 0.05), 40);
    view.x = at - ((at - view.x) * scale) / view.scale;
    view.y = down - ((down - view.y) * scale) / view.scale;
    view.scale = scale;
    place();
  };
  const move = (x, y) => {
    view.x += x;
    view.y += y;
    place();
  };
  for (const button of document.querySelectorAll(".picture")) {
    button.addEventListener("click", () => {
      const small = button.querySelector("img");
      image.src = small.src;
      image.alt = small.alt;
      [view.width, view.height] = [small.naturalWidth, small.naturalHeight];
      $("zoom-title").textContent = button.parentNode.querySelector("h3").textContent;
      dialog.showModal();
      fit();
    });
  }
  stage.addEventListener("wheel", (event) => {
    event.preventDefault();
    const box = stage.getBoundingClientRect();
    zoom(Math.exp(-event.deltaY * 0.0015), event.clientX - box.left, event.clientY - box.top);
  }, { passive: false });
  const fingers = new Map();
  stage.addEventListener("pointerdown", (event) => {
    stage.setPointerCapture(event.pointerId);
    fingers.set(event.pointerId, event);
  });
  stage.addEventListener("pointermove", (event) => {
    const last = fingers.get(event.pointerId);
    if (!last) return;
    if (fingers.size === 1) {
      move(event.clientX - last.clientX, event.clientY - last.clientY);
    } else {
      const other = [...fingers.values()].find((finger) => finger.pointerId !== event.pointerId);
      const apart = (finger) => Math.hypot(finger.clientX - other.clientX, finger.clientY - other.clientY);
      const box = stage.getBoundingClientRect();
      zoom(apart(event) / Math.max(apart(last), 1), (event.clientX + other.clientX) / 2 - box.left, (event.clientY + other.clientY) / 2 - box.top);
    }
    fingers.set(event.pointerId, event);
  });
  for (const kind of ["pointerup", "pointercancel"]) stage.addEventListener(kind, (event) => fingers.delete(event.pointerId));
  dialog.addEventListener("keydown", (event) => {
    const moves = { ArrowLeft: [80, 0], ArrowRight: [-80, 0], ArrowUp: [0, 80], ArrowDown: [0, -80] };
    if (event.key in moves) move(...moves[event.key]);
    else if (event.key === "+" || event.key === "=") zoom(1.25);
    else if (event.key === "-") zoom(0.8);
    else if (event.key === "0") fit();
    else return;
    event.preventDefault();
  });
  $("zoom-in").addEventListener("click", () => zoom(1.25));
  $("zoom-out").addEventListener("click", () => zoom(0.8));
  $("zoom-fit").addEventListener("click", fit);
  $("zoom-close").addEventListener("click", () => dialog.close());
  dialog.addEventListener("close", () => fingers.clear());
})();
