// Shows openapi.json to people.
const make = (tag, props = {}, ...children) => { const node = Object.assign(document.createElement(tag), props); node.append(...children); return node };
const spec = await (await fetch("/openapi.json")).json();
document.getElementById("title").textContent = spec.info.title;
document.getElementById("facts").textContent = spec.info.description;
const example = (method, path, operation) => {
  const types = Object.keys(operation.requestBody?.content ?? {});
  const body = types.includes("multipart/form-data") ? " -F image=@photo.jpg" : types.length ? " -H 'Content-Type: application/json' -d '" + JSON.stringify(operation.requestBody.content[types[0]].example ?? {}) + "'" : "";
  return "curl" + (method === "post" ? " -X POST" : "") + body + " " + location.origin + path;
};
for (const [path, methods] of Object.entries(spec.paths)) for (const [method, operation] of Object.entries(methods)) {
  const list = make("ul");
  for (const parameter of operation.parameters ?? []) list.append(make("li", { textContent: parameter.name + " (" + parameter.in + "): " + parameter.description }));
  for (const [status, answer] of Object.entries(operation.responses)) list.append(make("li", { textContent: status + ": " + answer.description }));
  document.getElementById("paths").append(make("section", { className: "card" }, make("h2", { textContent: method.toUpperCase() + " " + path }), make("p", { textContent: operation.summary }), make("pre", { textContent: example(method, path, operation) }), list));
}
