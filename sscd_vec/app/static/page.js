// The search page. No framework and no build: this file is what runs.
const $ = id => document.getElementById(id);
const make = (tag, props = {}, ...children) => {
  const node = Object.assign(document.createElement(tag), props);
  node.append(...children);
  return node;
};
const PAGE = 60;
const state = { calibrated: null, threshold: 0.5, results: [], offset: 0, total: 0 };

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

async function picture(key, image) {
  if (!sessionStorage.token) { image.src = "/picture/" + key; return }
  try { image.src = URL.createObjectURL(await (await ask("/picture/" + key)).blob()) } catch { /* stays blank */ }
}

function problem(error) {
  $("problem").hidden = !error;
  $("problem").textContent = error ? String(error.message ?? error) : "";
}

async function start() {
  try {
    const health = await (await ask("/info")).json();
    state.calibrated = health.threshold;
    setThreshold(health.threshold ?? 0.5);
    $("calibrated").disabled = health.threshold === null;
    showFacts(health);
  } catch (error) { problem(error) }
}
function showFacts(info) {
  $("facts").textContent = info.pictures.toLocaleString() + " pictures in the bank · " + info.model;
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
      entry.matches = answer.results[0].matches;
      state.results.unshift(entry);
      draw(entry);
    } catch (error) {
      URL.revokeObjectURL(entry.url);
      entry.box.replaceChildren(make("p", { className: "error", textContent: file.name + ": " + error.message }));
    }
  }
}

function draw(entry) {
  const copies = entry.matches.filter(match => match.score >= state.threshold);
  const verdict = make("p", { className: "verdict" + (copies.length ? " yes" : "") });
  verdict.textContent = copies.length ? "Copy of " + copies.length + (copies.length === 1 ? " picture" : " pictures") : "No copy found";
  const add = make("button", { textContent: entry.added ? "In the bank" : "Add to bank", disabled: Boolean(entry.added) });
  add.onclick = () => addToBank(entry, add);
  const left = make("div", {}, make("img", { className: "shot", src: entry.url, alt: entry.file.name }), verdict, make("p", { className: "facts", textContent: entry.file.name }), add);
  const right = make("div");
  for (const match of entry.matches) right.append(row(entry, match));
  if (!entry.matches.length) right.append(make("p", { className: "empty", textContent: "The bank is empty." }));
  const grid = make("div", { className: "query" }, left, right);
  entry.box.replaceChildren(grid);
}

function row(entry, match) {
  const copy = match.score >= state.threshold;
  const image = make("img", { alt: "" });
  if (match.key !== null) picture(match.key, image);
  const fill = make("i"), mark = make("b");
  fill.style.width = percent(match.score);
  mark.style.left = percent(state.threshold);
  const line = make("button", { className: "match " + (copy ? "copy" : "below") }, image,
    make("span", {}, make("span", { className: "score", textContent: match.score.toFixed(3) + (copy ? " · copy" : "") }),
      make("div", { className: "bar" }, fill, mark), match.id));
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

async function addToBank(entry, button) {
  button.disabled = true;
  try {
    const body = new FormData();
    body.append("image", entry.file);
    const answer = await (await ask("/add", { method: "POST", body })).json();
    entry.added = answer.ids[0];
    button.textContent = "In the bank";
    showFacts(await (await ask("/info")).json());
  } catch (error) { button.disabled = false; problem(error) }
}

// ---------------------------------------------------------------- side by side

async function compare(entry, match) {
  $("sideScore").textContent = "Score " + match.score.toFixed(3) + (match.score >= state.threshold ? " · copy" : " · below the threshold");
  const mine = make("div", { className: "big" }, make("img", { src: entry.url, alt: "your image" }));
  const image = make("img", { alt: match.id }), theirs = make("div", { className: "big" }, image);
  picture(match.key, image);
  $("pair").replaceChildren(
    make("figure", {}, mine, make("figcaption", { textContent: entry.file.name })),
    make("figure", {}, theirs, make("figcaption", { textContent: match.id })));
  $("heat").setAttribute("aria-pressed", "false");
  $("heat").onclick = () => toggleHeat(entry, match, mine, theirs);
  $("side").showModal();
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

// A heatmap is a small grid of bytes over the whole picture: 0 is unlike, 255 the strongest match.
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
    state.total = page.total;
    $("place").textContent = page.total ? (state.offset + 1) + "–" + (state.offset + page.pictures.length) + " of " + page.total.toLocaleString() : "nothing here";
    $("back").disabled = state.offset === 0;
    $("on").disabled = state.offset + PAGE >= page.total;
    $("pictures").replaceChildren(...page.pictures.map(entry => {
      const image = make("img", { alt: "", loading: "lazy" });
      picture(entry.key, image);
      const remove = make("button", { textContent: "Remove" });
      remove.onclick = async () => {
        if (!confirm("Remove this picture from the bank? Its file stays where it is.")) return;
        try {
          await ask("/remove", { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify({ ids: [entry.id] }) });
          browse();
        } catch (error) { problem(error) }
      };
      return make("figure", {}, image, make("figcaption", { textContent: entry.id }), remove);
    }));
  } catch (error) { problem(error) }
}
function show(tab) {
  $("search").hidden = tab !== "search";
  $("bank").hidden = tab !== "bank";
  for (const [id, name] of [["tabSearch", "search"], ["tabBank", "bank"]]) name === tab ? $(id).setAttribute("aria-current", "page") : $(id).removeAttribute("aria-current");
  if (tab === "bank") browse();
}

// ---------------------------------------------------------------- events

const images = list => [...list].filter(file => file.type.startsWith("image/"));
$("files").onchange = () => { search(images($("files").files)); $("files").value = "" };
addEventListener("dragover", event => { event.preventDefault(); $("drop").classList.add("over") });
addEventListener("dragleave", event => { if (!event.relatedTarget) $("drop").classList.remove("over") });
addEventListener("drop", event => {
  event.preventDefault();
  $("drop").classList.remove("over");
  const files = images(event.dataTransfer.files);
  if (files.length) { show("search"); search(files) } else problem("That is not an image file.");
});
addEventListener("paste", event => { const files = images(event.clipboardData.files); if (files.length) search(files) });
$("threshold").oninput = () => setThreshold($("threshold").value);
$("calibrated").onclick = () => setThreshold(state.calibrated);
$("tabSearch").onclick = () => show("search");
$("tabBank").onclick = () => show("bank");
$("back").onclick = () => { state.offset = Math.max(0, state.offset - PAGE); browse() };
$("on").onclick = () => { state.offset += PAGE; browse() };
$("text").oninput = () => { state.offset = 0; browse() };
$("shut").onclick = () => $("side").close();
$("side").onclick = event => { if (event.target === $("side")) $("side").close() };
$("login").onclose = () => { sessionStorage.token = $("token").value; problem(null); start() };
start();
