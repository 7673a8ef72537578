"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const words = data.strings, entries = data.entries;
  const SVG = "http://www.w3.org/2000/svg";
  const HEIGHT = 44;
  const byId = (id) => document.getElementById(id);
  const isMiss = (number) => number >= data.firstMiss;
  const colour = (entry) => data.colours[entry.kind] || data.other;
  const state = (number) => isMiss(number) ? "miss" : entries[number].decision;
  // An entry's texts are numbers into the table of strings, or absent.
  const text = (entry, field) => entry[field] === undefined ? "" : words[entry[field]];

  function make(tag, attributes = {}, ...children) {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (name === "onclick") element.onclick = value;
      else element.setAttribute(name, value);
    }
    element.append(...children);
    return element;
  }

  function draw(tag, attributes, parent) {
    const element = document.createElementNS(SVG, tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    if (parent) parent.append(element);
    return element;
  }

  // ------------------------------------------------------------------ which entries are the same in other layers
  const peers = new Map();
  data.lines.forEach((line, index) => line.entries.forEach((numbers) => numbers.forEach((number, position) => {
    if (entries[number].home === index) peers.set(number, { line: index, first: line.entries[0][position], position });
  })));
  const sameAs = (number) => {
    const place = peers.get(number);
    if (!place) return [number];
    return data.lines[place.line].entries.map((numbers) => numbers[place.position]).filter((n) => n !== undefined);
  };

  // ------------------------------------------------------------------------------------------------- the tables
  function table(target, numbers, columns) {
    const groups = new Map();
    for (const number of numbers) {
      const entry = entries[number];
      const key = JSON.stringify([entry.kind, entry.pattern, entry.decision, entry.reason, entry.variant, entry.source,
        entry.bound, entry.hint]);
      if (!groups.has(key)) groups.set(key, []);
      groups.get(key).push(number);
    }
    if (!groups.size) return target.append("none");
    const head = make("tr", {}, ...["", "kind", ...columns.map((c) => c[0])].map((name) => make("th", {}, name)));
    const body = make("tbody");
    for (const group of groups.values()) {
      const number = group[0], entry = entries[number];
      const count = group.reduce((sum, n) => sum + (entries[n].count === undefined ? 1 : entries[n].count), 0);
      const link = make("button", { class: "link", "data-entry": number, onclick: () => show(number, true) },
        badge(number, count));
      const row = make("tr", {}, make("td", {}, `#${number}`), make("td", {}, link));
      for (const [, field, code] of columns) {
        const value = field === "decision" ? entry.decision : text(entry, field);
        row.append(make("td", {}, code ? make("code", {}, value) : value));
      }
      body.append(row);
    }
    target.append(make("table", {}, make("thead", {}, head), body));
  }

  function badge(number, count) {
    const entry = entries[number];
    const element = make("span", { class: `badge ${state(number)} ${entry.kind}` }, entry.kind + (count > 1 ? ` ×${count}` : ""));
    element.style.setProperty("--kind", colour(entry));
    return element;
  }

  const all = [...entries.keys()];
  table(byId("miss-table"), all.filter(isMiss), [["why not", "reason"], ["what would make it match", "hint"], ["source", "source", true]]);
  table(byId("site-table"), all.filter((n) => !isMiss(n)), [["", "decision"], ["why", "reason"], ["variant", "variant"], ["source", "source", true]]);

  // ------------------------------------------------------------------------------------------------- the lines
  const folds = [];
  data.lines.forEach((line, index) => {
    const kinds = new Map();
    for (const number of line.entries[0] || []) {
      const key = entries[number].kind + state(number);
      kinds.set(key, [number, (kinds.get(key) || [0, 0])[1] + 1]);
    }
    const marks = make("span", { class: "marks" }, ...[...kinds.values()].map(([number, n]) => badge(number, n)));
    const last = line.paths[line.paths.length - 1];
    const name = line.title + (line.paths.length > 1 ? ` … ${last}` : "");
    const button = make("button", { class: "fold", "aria-expanded": "false", onclick: () => toggle(index) },
      make("span", { "aria-hidden": "true" }, "▸"), make("span", { class: "name" }, name));
    if (line.paths.length > 1) button.append(make("span", { class: "times" }, `×${line.paths.length}`));
    button.append(make("span", { class: "module" }, line.module), marks);
    if (line.paths.length > 1) button.title = line.paths.join(", ");
    const inner = make("div", { class: "inner", hidden: "" });
    const element = make("div", { class: "line", "data-line": index }, button, inner);
    folds.push({ element, button, inner, views: null });
    (line.parent < 0 ? byId("lines") : folds[line.parent].inner).append(element);
  });

  function toggle(index, open) {
    const fold = folds[index];
    const isOpen = fold.button.getAttribute("aria-expanded") === "true";
    if (open === isOpen) return;
    fold.button.setAttribute("aria-expanded", String(!isOpen));
    fold.button.firstChild.textContent = isOpen ? "▸" : "▾";
    fold.inner.hidden = isOpen;
    if (isOpen) return fold.element.lastChild.remove(), fold.views = null, undefined;
    const line = data.lines[index];
    if (line.parent >= 0) toggle(line.parent, true);
    const sides = make("div", { class: "sides" });
    fold.element.append(sides);
    fold.views = [["before", line.before], ["after", line.after]].map(([name, block]) => {
      const nodes = block < 0 ? 0 : data.blocks[block].nodes.filter((n) => n[5] !== -2).length;
      const side = make("div", { class: "side" }, make("h3", {}, `${name}: ${nodes ? `${nodes} node${nodes > 1 ? "s" : ""}` : "nothing here"}`));
      sides.append(side);
      return block < 0 ? null : view(data.blocks[block], side, `${line.title}, ${name}`);
    });
  }

  // ------------------------------------------------------------------------------------------------ the drawings
  function view(block, parent, label) {
    const svg = draw("svg", { tabindex: 0, role: "group", "aria-label": `${label}: + and - zoom, arrows pan, 0 fits` });
    parent.append(svg);
    hatch(svg);
    const box = { left: 1e9, top: 1e9, right: -1e9, bottom: -1e9 };
    const hulls = new Map();
    block.places.forEach(([x, y, width], i) => {
      grow(box, x, y, width);
      const number = block.nodes[i][5];
      if (number >= 0) {
        if (!hulls.has(number)) hulls.set(number, { left: 1e9, top: 1e9, right: -1e9, bottom: -1e9 });
        grow(hulls.get(number), x, y, width);
      }
    });
    for (const [number, hull] of hulls) {
      draw("rect", { class: `hull ${state(number)}`, x: hull.left - 7, y: hull.top - 7, rx: 6, width: hull.right - hull.left + 14,
        height: hull.bottom - hull.top + 14, fill: paint(number), stroke: colour(entries[number]) }, svg);
    }
    for (const [from, to] of block.edges) {
      const [a, b] = [block.places[from], block.places[to]];
      const middle = (a[1] + b[1]) / 2;
      draw("path", { class: "edge", d: `M${a[0]} ${a[1] + HEIGHT / 2}C${a[0]} ${middle} ${b[0]} ${middle} ${b[0]} ${b[1] - HEIGHT / 2}` }, svg);
    }
    const nodes = block.nodes.map((node, i) => {
      const [name, target, type, , source, number] = node;
      const [x, y, width] = block.places[i];
      const classes = ["node"];
      if (number === -2) classes.push("outside");
      if (number >= 0) classes.push("marked", state(number));
      if (number >= 0 && entries[number].kind === "attention" && !isMiss(number)) classes.push("dark");
      const group = draw("g", { class: classes.join(" ") }, svg);
      const rect = draw("rect", { x: x - width / 2, y: y - HEIGHT / 2, width, height: HEIGHT, rx: 4 }, group);
      if (number >= 0) {
        rect.style.fill = paint(number);
        group.setAttribute("tabindex", "0");
        group.setAttribute("role", "button");
        group.setAttribute("data-entry", number);
        group.setAttribute("aria-label", `${entries[number].kind} ${state(number)}: ${words[name]}`);
        group.addEventListener("click", () => svg.dragged || show(number, false));
        group.addEventListener("keydown", (event) => {
          if (event.key !== "Enter" && event.key !== " ") return;
          event.preventDefault();
          show(number, false);
        });
      }
      draw("title", {}, group).textContent = [words[name], words[target], words[type], words[source]].filter(Boolean).join("\n");
      const lines = number === -2 ? [words[name]] : [words[name], words[target].replace(/^aten\.|\.default$/g, ""), words[type]];
      const room = Math.floor((width - 8) / 6.3);
      lines.forEach((part, row) => {
        const cut = part.length > room ? part.slice(0, room - 1) + "…" : part;
        draw("text", { x, y: y - (lines.length - 1) * 6.5 + row * 13 + 3.5, "text-anchor": "middle" }, group).textContent = cut;
      });
      return group;
    });
    return Object.assign(movable(svg, box), { block, nodes });
  }

  function grow(box, x, y, width) {
    box.left = Math.min(box.left, x - width / 2); box.right = Math.max(box.right, x + width / 2);
    box.top = Math.min(box.top, y - HEIGHT / 2); box.bottom = Math.max(box.bottom, y + HEIGHT / 2);
  }

  const paint = (number) => isMiss(number) ? "url(#hatch)" : colour(entries[number]);

  function hatch(svg) {
    const pattern = draw("pattern", { id: "hatch", width: 7, height: 7, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" },
      draw("defs", {}, svg));
    draw("rect", { width: 7, height: 7, fill: "#fff" }, pattern);
    draw("rect", { width: 2, height: 7, fill: "#f3c6ad" }, pattern);
  }

  function movable(svg, box) {
    const frame = { x: 0, y: 0, scale: 1 };
    const size = () => [svg.clientWidth || 600, svg.clientHeight || 500];
    const apply = () => {
      const [width, height] = size();
      svg.setAttribute("viewBox", `${frame.x} ${frame.y} ${width / frame.scale} ${height / frame.scale}`);
      svg.dataset.scale = frame.scale.toFixed(3);
    };
    const fit = () => {
      const [width, height] = size();
      frame.scale = Math.min(1, width / (box.right - box.left + 40), Math.max(.35, height / (box.bottom - box.top + 40)));
      frame.x = (box.left + box.right - width / frame.scale) / 2;
      frame.y = box.top - 20;
      apply();
    };
    const zoom = (factor, px, py) => {
      const scale = Math.min(4, Math.max(.03, frame.scale * factor));
      frame.x += px / frame.scale - px / scale;
      frame.y += py / frame.scale - py / scale;
      frame.scale = scale;
      apply();
    };
    const pan = (dx, dy) => { frame.x -= dx / frame.scale; frame.y -= dy / frame.scale; apply(); };
    const centre = (x, y) => {
      const [width, height] = size();
      frame.scale = Math.max(frame.scale, .8);
      frame.x = x - width / 2 / frame.scale; frame.y = y - height / 2 / frame.scale;
      apply();
    };
    svg.addEventListener("wheel", (event) => {
      event.preventDefault();
      const area = svg.getBoundingClientRect();
      zoom(Math.exp(-event.deltaY / 400), event.clientX - area.left, event.clientY - area.top);
    }, { passive: false });
    let held = null;
    svg.addEventListener("pointerdown", (event) => { held = [event.clientX, event.clientY]; svg.dragged = false; });
    svg.addEventListener("pointermove", (event) => {
      if (!held || !event.buttons) return;
      const [dx, dy] = [event.clientX - held[0], event.clientY - held[1]];
      if (!svg.dragged && Math.hypot(dx, dy) < 4) return;
      svg.dragged = true;
      held = [event.clientX, event.clientY];
      pan(dx, dy);
    });
    svg.addEventListener("pointerup", () => { held = null; });
    svg.addEventListener("keydown", (event) => {
      const [width, height] = size();
      const moves = { ArrowLeft: [60, 0], ArrowRight: [-60, 0], ArrowUp: [0, 60], ArrowDown: [0, -60] };
      if (event.key in moves) pan(...moves[event.key]);
      else if (event.key === "+" || event.key === "=") zoom(1.25, width / 2, height / 2);
      else if (event.key === "-") zoom(.8, width / 2, height / 2);
      else if (event.key === "0") fit();
      else return;
      event.preventDefault();
    });
    fit();
    return { svg, centre };
  }

  // ------------------------------------------------------------------------------------------------- the details
  function show(number, travel) {
    const entry = entries[number], panel = byId("details");
    current = number;
    panel.hidden = false;
    document.body.classList.add("reading");
    if (travel) goTo(number);
    document.querySelectorAll("svg .chosen").forEach((node) => node.classList.remove("chosen"));
    const drawn = peers.has(number) ? peers.get(number).first : number;
    document.querySelectorAll(`svg [data-entry="${drawn}"], svg [data-entry="${number}"]`)
      .forEach((node) => node.classList.add("chosen"));
    const list = make("dl");
    const add = (name, value, code) => {
      if (value === "" || value === undefined) return;
      list.append(make("dt", {}, name), make("dd", {}, code ? make("code", {}, value) : value));
    };
    if (isMiss(number)) {
      add("why not", text(entry, "reason"));
      add("to match", text(entry, "hint"));
    } else {
      add("decision", entry.decision === "rewritten" ? "rewritten" : "left to Inductor");
      add("why", text(entry, "reason"));
      add("operator", entry.operator, true);
      const [variant, why, ...launches] = (entry.plan || []).map((n) => words[n]);
      const reference = text(entry, "variant") === "reference";
      if (entry.decision === "rewritten") add("kernel variant", text(entry, "variant"));
      else if (variant) add("kernel variant", `${variant}, if it were rewritten`);
      add("chosen because", reference ? "there is no kernel for this device, or none yet" : why);
      if (!reference) (launches || []).forEach((launch) => add("launch", launch, true));
      for (const [name, value] of Object.entries(entry.bound || {})) add(name, value);
      const asked = Object.entries(entry.features || {}).map(([name, value]) => `${name}=${value}`).join(", ");
      add("the gate saw", asked);
    }
    add("module", entry.path, true);
    add("pattern", text(entry, "pattern"));
    const others = sameAs(number);
    if (others.length > 1) add("the same", `${others.length} times: ` + others.map((n) => `#${n} ${entries[n].path || ""}`).join(", "));
    const lines = (entry.lines || []).map((n) => words[n]);
    if (lines.length) add("source lines", lines.join("\n"), true);
    else add("source", text(entry, "source"), true);
    add("nodes", (entry.nodes || []).join(" "), true);
    const close = make("button", { class: "close", onclick: hide }, "Close");
    panel.replaceChildren(close, make("h2", {}, `#${number} `, badge(number, 1)), list,
      make("p", {}, make("code", {}, `portable-ops repro DUMP --site ${number}`)));
  }

  const hide = () => { byId("details").hidden = true; document.body.classList.remove("reading"); };

  function goTo(number) {
    const place = peers.get(number);
    if (!place) return;
    toggle(place.line, true);
    folds[place.line].element.scrollIntoView({ block: "start" });
    window.scrollBy(0, -60);
    for (const one of folds[place.line].views) {
      if (!one) continue;
      const at = one.block.nodes.findIndex((node) => node[5] === place.first);
      if (at >= 0) one.centre(one.block.places[at][0], one.block.places[at][1]);
    }
  }

  // ------------------------------------------------------------------------------------------------- the search
  let hits = [], hit = -1, current = -1;
  function search(wanted) {
    document.querySelectorAll("svg .hit").forEach((node) => node.classList.remove("hit"));
    hits = []; hit = -1;
    wanted = wanted.trim().toLowerCase();
    if (wanted) {
      const matching = words.map((word) => word.toLowerCase().includes(wanted));
      const shown = new Set();
      data.lines.forEach((line, index) => {
        const found = [];
        for (const side of [0, 1]) {
          const block = data.blocks[side ? line.after : line.before];
          if (block) block.nodes.forEach((node, i) => { if (node[5] !== -2 && node.slice(0, 5).some((w) => w && matching[w])) found.push([index, side, i]); });
        }
        const named = line.paths.some((path) => path.toLowerCase().includes(wanted));
        // A module inside of a layer has nodes that the layer has as well: they count once.
        if (line.parent < 0) hits.push(...found);
        if (named) hits.push([index, -1, 0]);
        if (named || found.length) for (let up = index; up >= 0; up = data.lines[up].parent) shown.add(up);
      });
      data.lines.forEach((line, index) => { folds[index].element.style.display = shown.has(index) ? "" : "none"; });
    } else folds.forEach((fold) => { fold.element.style.display = ""; });
    byId("found").textContent = wanted ? `${hits.length} found` : "";
  }

  function nextHit() {
    if (!hits.length) return;
    hit = (hit + 1) % hits.length;
    const [index, side, i] = hits[hit];
    toggle(index, true);
    document.querySelectorAll("svg .hit").forEach((node) => node.classList.remove("hit"));
    const one = side < 0 ? null : folds[index].views[side];
    if (one) {
      one.nodes[i].classList.add("hit");
      one.centre(one.block.places[i][0], one.block.places[i][1]);
    }
    folds[index].element.scrollIntoView({ block: "start" });
    window.scrollBy(0, -60);
    byId("found").textContent = `${hit + 1} of ${hits.length}`;
  }

  byId("search").addEventListener("input", (event) => search(event.target.value));
  byId("search").addEventListener("keydown", (event) => {
    if (event.key === "Enter") nextHit();
    if (event.key === "Escape") { event.target.value = ""; search(""); event.target.blur(); }
  });
  byId("keys-button").addEventListener("click", (event) => {
    byId("keys").hidden = !byId("keys").hidden;
    event.target.setAttribute("aria-expanded", String(!byId("keys").hidden));
  });
  document.addEventListener("keydown", (event) => {
    if (event.target.tagName === "INPUT" || event.ctrlKey || event.metaKey || event.altKey) return;
    const step = (from, by) => ((from % entries.length) + entries.length + by) % entries.length;
    if (event.key === "/") { event.preventDefault(); byId("search").focus(); }
    else if (event.key === "Escape") hide();
    else if (event.key === "n" && entries.length) show(step(current < 0 ? -1 : current, 1), true);
    else if (event.key === "p" && entries.length) show(step(current < 0 ? 0 : current, -1), true);
    else if (event.key === "m" && entries.length > data.firstMiss) {
      const next = current >= data.firstMiss && current + 1 < entries.length ? current + 1 : data.firstMiss;
      show(next, true);
    }
  });
})();
