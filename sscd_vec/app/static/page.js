// The search page. No framework and no build: this file is what runs.
const $ = id => document.getElementById(id);
const make = (tag, props = {}, ...children) => {
  const node = Object.assign(document.createElement(tag), props);
  node.append(...children);
  return node;
};
const PAGE = 60;
const LARGE = 1600;  // pixels along the long side of an image shown side by side
const state = { info: null, threshold: 0.5, results: [], offset: 0 };

// A token may come in the address after '#', which browsers never send to a server.
if (location.hash.startsWith("#token=")) {
  sessionStorage.token = decodeURIComponent(location.hash.slice(7));
  history.replaceState(null, "", location.pathname);
}

async function ask(path, options = {}) {
  const headers = sessionStorage.token ? { Authorization: "Bearer " + sessionStorage.token } : {};
  for (let attempt = 0; ; attempt++) {
    const response = await fetch(path, { ...options, headers: { ...headers, ...options.headers } });
    if (response.ok) return response;
    if (response.status === 401) { $("login").showModal(); throw new Error("a token is needed"); }
    if (response.status === 503 && attempt < 5) {  // the server is busy and says so: wait, ask again
      await new Promise(done => setTimeout(done, 400 * 2 ** attempt));
      continue;
    }
    let said = response.statusText;
    try { said = (await response.json()).error ?? said } catch { /* not JSON */ }
    throw new Error(said);
  }
}

// The browser asks for an image itself, unless that needs the token.
async function showImage(key, image, side = 480) {
  const path = "/image/" + key + "?side=" + side;
  if (!sessionStorage.token) { image.src = path; return }
  try { image.src = URL.createObjectURL(await (await ask(path)).blob()) } catch { /* stays blank */ }
}

function problem(error) {
  $("problem").hidden = !error;
  $("problem").textContent = error ? String(error.message ?? error) : "";
}

async function start() {
  try {
    showInfo(await (await ask("/info")).json());
    setThreshold(localStorage.getItem("threshold") ?? state.info.threshold ?? 0.5);
    $("saveParquet").hidden = !state.info.parquet;
    $("calibrated").disabled = state.info.threshold === null;
    $("meaning").textContent = thresholdMeaning(state.info);
  } catch (error) { problem(error) }
}
function showInfo(info) {
  state.info = info;
  $("facts").textContent = plural(info.images, "image") + " in the bank" + (info.model ? " · " + info.model : "");
}
const plural = (count, noun) => count.toLocaleString() + " " + noun + (count === 1 ? "" : "s");

// Where the threshold comes from, in a sentence.
function thresholdMeaning({ threshold, threshold_facts: facts }) {
  if (threshold === null) return "This bank has no calibrated threshold: 0.5 is only a place to start. Move the slider until it fits your images.";
  const value = threshold.toFixed(3);
  if (facts.source !== "calibrated") return "This server was told to call everything from " + value + " on a copy.";
  const interval = facts.interval ? " (between " + facts.interval.map(end => end.toFixed(3)).join(" and ") + ", as far as that sample tells)" : "";
  return "The threshold " + value + interval + " was calibrated so that " + promise(facts) + (facts.note ? ": " + facts.note : "") + ".";
}

function promise({ target, wanted }) {
  if (target === "precision") return Math.round(100 * wanted) + " % of the judged pairs above it were copies";
  const rare = "about 1 in " + Math.round(1 / wanted).toLocaleString();
  return target === "false_match_rate_per_query" ? rare + " searches for an image that is not in the bank finds a false copy" : rare + " pairs of unrelated images scores as high";
}

// ---------------------------------------------------------------- searching

async function search(files) {
  problem(null);
  for (const file of files) {
    const entry = { file, url: URL.createObjectURL(file), box: make("section", { className: "card" }) };
    entry.box.append(make("p", { className: "empty", textContent: "Searching for " + file.name + " …" }));
    $("results").prepend(entry.box);
    try {
      const body = new FormData();
      body.append("image", file);
      const answer = await (await ask("/search", { method: "POST", body })).json();
      entry.digest = answer.results[0].digest;
      entry.matches = answer.results[0].matches;
      state.results.unshift(entry);
      $("export").hidden = false;
      draw(entry);
    } catch (error) {
      URL.revokeObjectURL(entry.url);
      entry.box.replaceChildren(make("p", { className: "error", textContent: file.name + ": " + error.message }));
    }
  }
}

function draw(entry) {
  const copies = entry.matches.filter(isCopy), others = entry.matches.filter(match => !isCopy(match));
  const graded = grade => others.some(match => verdictOf(match) === grade);
  const verdict = make("p", { className: "verdict" + (copies.length ? " yes" : "") });
  verdict.textContent = copies.length ? "Copy of " + plural(copies.length, "image")
    : graded("unsure") ? "Unsure: look at the best matches yourself" : graded("look") ? "Perhaps a copy: take a look" : "No copy found";
  const left = make("div", {}, make("img", { className: "shot", src: entry.url, alt: entry.file.name }), verdict, make("p", { className: "facts name", textContent: entry.file.name }));
  if (!state.info?.read_only) left.append(addButton(entry));
  const right = make("div", {}, make("div", { className: copies.length < 4 ? "matches few" : "matches" }, ...copies.map(match => card(entry, match))));
  if (others.length) right.append(make("details", { open: entry.open ?? !copies.length, ontoggle: event => { entry.open = event.target.open } },
    make("summary", { textContent: plural(others.length, "nearest image") + (graded("unsure") ? " that may not be copies" : " below the threshold") }),
    make("div", { className: "matches" }, ...others.map(match => card(entry, match)))));
  if (!entry.matches.length) right.append(make("p", { className: "empty", textContent: "The bank is empty." }));
  entry.box.replaceChildren(make("div", { className: "query" }, left, right));
}
// On a server that verifies, the score of a match without local features is one of descriptors.
// What a person decided holds. What the server is unsure about, no slider decides; elsewhere its verdict holds until the slider is moved.
function verdictOf(match) {
  if (match.decision !== null) return match.decision ? "copy" : "no";
  const calibrated = state.info?.threshold ?? null, mixed = state.info?.verify && !match.verified;
  if (mixed || (calibrated !== null && (match.verdict === "unsure" || state.threshold === calibrated))) return match.verdict;
  return match.score >= state.threshold ? "copy" : match.verdict === "copy" || match.verdict === "look" ? "look" : "no";
}
const isCopy = match => verdictOf(match) === "copy";
const said = match => match.decision === false ? " · not a copy, you said" : match.decision ? " · copy, you said" : verdictOf(match) === "no" ? "" : " · " + verdictOf(match);

function addButton(entry) {
  const button = make("button", { textContent: entry.added ? "In the bank" : "Add to bank", disabled: Boolean(entry.added) });
  button.onclick = () => addToBank(entry, button);
  return button;
}

function card(entry, match) {
  const image = make("img", { alt: "", loading: "lazy" });
  if (match.key !== null) showImage(match.key, image);
  const fill = make("i"), mark = make("b");
  fill.style.width = percent(match.score);
  mark.style.left = percent(state.threshold);
  const line = make("button", { className: "match " + (isCopy(match) ? "copy" : "below") }, image,
    make("span", { className: "score", textContent: match.score.toFixed(3) + said(match), title: match.reason }),
    make("span", { className: "bar" }, fill, mark), make("span", { className: "name", textContent: match.name }));
  line.onclick = () => compare(entry, match);
  line.disabled = match.key === null;
  return line;
}
// The bar runs from -0.2 to 1, like the slider.
const percent = score => Math.max(0, Math.min(100, (score + 0.2) / 1.2 * 100)) + "%";

function setThreshold(value) {
  state.threshold = Number(value);
  $("threshold").value = value;
  $("thresholdValue").textContent = state.threshold.toFixed(3);
  for (const entry of state.results) draw(entry);
}

// ---------------------------------------------------------------- taking results away

function exportedRows() {
  return state.results.flatMap(({ file, matches }) => matches.map((match, rank) => ({
    image: file.name, rank: rank + 1, id: match.id, name: match.name, score: match.score, threshold: state.threshold, copy: isCopy(match), verdict: verdictOf(match), reason: match.reason })));
}
// A cell that a spreadsheet would take for a formula gets a quote before it.
const cell = value => typeof value === "string" ? '"' + (/^[=+\-@\t\r]/.test(value) ? "'" : "") + value.replaceAll('"', '""') + '"' : String(value);
function toCsv(rows) {
  const columns = ["image", "rank", "id", "name", "score", "threshold", "copy", "verdict", "reason"];
  return [columns, ...rows.map(row => columns.map(column => cell(row[column])))].map(line => line.join(",")).join("\r\n") + "\r\n";
}
function save(name, type, content) {
  const link = make("a", { href: URL.createObjectURL(new Blob([content], { type })), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

async function saveParquet() {
  try {
    const body = JSON.stringify(exportedRows()), headers = { "Content-Type": "application/json" };
    save("matches.parquet", "application/vnd.apache.parquet", await (await ask("/parquet", { method: "POST", body, headers })).arrayBuffer());
  } catch (error) { problem(error) }
}
async function saveDecisions() {
  try { save("decisions.json", "application/json", JSON.stringify(await (await ask("/decisions")).json(), null, 1)) } catch (error) { problem(error) }
}

async function addToBank(entry, button) {
  button.disabled = true;
  try {
    const body = new FormData();
    body.append("image", entry.file);
    const answer = await (await ask("/add", { method: "POST", body })).json();
    entry.added = answer.ids[0];
    button.textContent = "In the bank";
    showInfo(await (await ask("/info")).json());
  } catch (error) { button.disabled = false; problem(error) }
}

// ---------------------------------------------------------------- side by side

async function compare(entry, match) {
  explain(entry, match);
  const mine = make("div", { className: "big" }, make("img", { src: entry.url, alt: "your image", onload: fit }));
  const image = make("img", { alt: match.name, onload: fit }), theirs = make("div", { className: "big" }, image);
  showImage(match.key, image, LARGE);
  if (match.region) { mine.append(trace(match.region.query)); theirs.append(trace(match.region.reference)) }
  $("pair").replaceChildren(
    make("figure", {}, mine, make("figcaption", { className: "name", textContent: entry.file.name })),
    make("figure", {}, theirs, make("figcaption", { className: "name", textContent: match.name })));
  $("heat").setAttribute("aria-pressed", "false");
  $("heat").onclick = () => toggleHeat(entry, match, mine, theirs);
  $("side").showModal();
}

// What the score means, and the buttons for a person who knows better.
function explain(entry, match) {
  $("sideScore").textContent = "Score " + match.score.toFixed(3) + (said(match) || " · below the threshold of " + state.threshold.toFixed(3)) + (match.decision === null ? " · " + match.reason : "");
  if (state.info?.read_only) return;
  const button = (text, is_copy) => {
    const node = make("button", { textContent: text, onclick: () => decide(entry, match, is_copy) });
    node.setAttribute("aria-pressed", String(match.decision === is_copy));
    return node;
  };
  $("rule").replaceChildren(button("It is a copy", true), " ", button("Not a copy", false));
}
async function decide(entry, match, is_copy) {
  try {
    const body = JSON.stringify({ image: entry.digest, id: match.id, is_copy });
    await ask("/decide", { method: "POST", body, headers: { "Content-Type": "application/json" } });
    match.decision = is_copy;
    explain(entry, match);
    draw(entry);
  } catch (error) { $("side").close(); problem(error) }
}

// As large as there is room, small images up to three times their size.
function fit(event) {
  const image = event.target, room = image.closest("figure").clientWidth;
  const scale = Math.min(room / image.naturalWidth, 0.74 * innerHeight / image.naturalHeight, 3);
  image.style.width = Math.floor(scale * image.naturalWidth) + "px";
}

async function toggleHeat(entry, match, mine, theirs) {
  const on = $("heat").getAttribute("aria-pressed") !== "true";
  $("heat").setAttribute("aria-pressed", String(on));
  if (on && !mine.querySelector("canvas")) {
    $("heat").disabled = true;
    try {
      const body = new FormData();
      body.append("image", entry.file);
      body.append("key", String(match.key));
      const maps = await (await ask("/heatmap", { method: "POST", body })).json();
      mine.append(paint(maps.query));
      theirs.append(paint(maps.reference));
    } catch (error) { $("side").close(); problem(error) }
    $("heat").disabled = false;
  }
  for (const canvas of $("pair").querySelectorAll("canvas")) canvas.hidden = !on;
}

// The outline of what was copied, twice: dark below light is seen on any image.
function trace(outline) {
  const node = name => document.createElementNS("http://www.w3.org/2000/svg", name), drawing = node("svg");
  drawing.setAttribute("viewBox", "0 0 1 1");
  drawing.setAttribute("preserveAspectRatio", "none");
  for (let layer = 0; layer < 2; layer++) {
    const polygon = node("polygon");
    polygon.setAttribute("points", outline.map(corner => corner.join(",")).join(" "));
    drawing.append(polygon);
  }
  return drawing;
}

// A heatmap is a small grid of bytes over the whole image: 0 is unlike, 255 the strongest match.
function paint({ width, height, values }) {
  const canvas = make("canvas", { width, height }), grid = atob(values);
  const context = canvas.getContext("2d"), pixels = context.createImageData(width, height);
  for (let i = 0; i < width * height; i++) {
    const v = grid.charCodeAt(i) / 255;
    pixels.data.set([255 * Math.min(1, 2 * v), 255 * Math.max(0, 1.6 * v - .6), 255 * Math.max(0, .55 - v), 255 * (.25 + .75 * v)], 4 * i);
  }
  context.putImageData(pixels, 0, 0);
  return canvas;
}

// ---------------------------------------------------------------- the bank

async function browse() {
  try {
    const query = new URLSearchParams({ offset: state.offset, limit: PAGE, text: $("text").value });
    const page = await (await ask("/bank?" + query)).json();
    $("place").textContent = page.total ? (state.offset + 1) + "–" + (state.offset + page.images.length) + " of " + page.total.toLocaleString() : "nothing here";
    $("back").disabled = state.offset === 0;
    $("on").disabled = state.offset + PAGE >= page.total;
    $("images").replaceChildren(...page.images.map(bankImage));
  } catch (error) { problem(error) }
}
function bankImage(entry) {
  const image = make("img", { alt: "", loading: "lazy" });
  showImage(entry.key, image);
  const figure = make("figure", {}, image, make("figcaption", { className: "name", textContent: entry.name }));
  if (!state.info?.read_only) figure.append(make("button", { textContent: "Remove", onclick: () => remove(entry) }));
  return figure;
}
async function remove(entry) {
  if (!confirm("Remove this image from the bank? A file of yours stays where it is.")) return;
  try {
    await ask("/remove", { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify({ ids: [entry.id] }) });
    browse();
    showInfo(await (await ask("/info")).json());
  } catch (error) { problem(error) }
}
function show(tab) {
  $("search").hidden = tab !== "search";
  $("bank").hidden = tab !== "bank";
  for (const [id, name] of [["tabSearch", "search"], ["tabBank", "bank"]]) name === tab ? $(id).setAttribute("aria-current", "page") : $(id).removeAttribute("aria-current");
  if (tab === "bank") browse();
}

// ---------------------------------------------------------------- events

// Some browsers know no type of a phone's HEIC: the server says what it can read.
const isImage = file => !file.type || file.type.startsWith("image/");
function take(list) {
  const files = [...list].filter(isImage), others = [...list].filter(file => !isImage(file));
  if (files.length) { show("search"); search(files) }
  if (others.length) problem("Not an image: " + others.map(file => file.name).join(", "));
}
$("files").onchange = () => { take($("files").files); $("files").value = "" };
addEventListener("dragover", event => { event.preventDefault(); $("drop").classList.add("over") });
addEventListener("dragleave", event => { if (!event.relatedTarget) $("drop").classList.remove("over") });
addEventListener("drop", event => {
  event.preventDefault();
  $("drop").classList.remove("over");
  take(event.dataTransfer.files);
});
addEventListener("paste", event => take(event.clipboardData.files));
$("threshold").oninput = () => { localStorage.setItem("threshold", $("threshold").value); setThreshold($("threshold").value) };
$("calibrated").onclick = () => { localStorage.removeItem("threshold"); setThreshold(state.info.threshold) };
$("saveCsv").onclick = () => save("matches.csv", "text/csv", toCsv(exportedRows()));
$("saveJson").onclick = () => save("matches.json", "application/json", JSON.stringify(exportedRows(), null, 1));
$("saveParquet").onclick = saveParquet;
$("saveDecisions").onclick = saveDecisions;
$("tabSearch").onclick = () => show("search");
$("tabBank").onclick = () => show("bank");
$("back").onclick = () => { state.offset = Math.max(0, state.offset - PAGE); browse() };
$("on").onclick = () => { state.offset += PAGE; browse() };
$("text").oninput = () => { state.offset = 0; browse() };
$("shut").onclick = () => $("side").close();
$("side").onclick = event => { if (event.target === $("side")) $("side").close() };
$("login").onclose = () => { sessionStorage.token = $("token").value; problem(null); start() };
start();
