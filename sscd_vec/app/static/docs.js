// Shows openapi.json to people.
const make = (tag, props = {}, ...children) => { const node = Object.assign(document.createElement(tag), props); node.append(...children); return node };
const spec = await (await fetch("/openapi.json")).json();
document.getElementById("title").textContent = spec.info.title;
document.getElementById("facts").textContent = spec.info.description;
const resolve = schema => schema.$ref ? spec.components.schemas[schema.$ref.split("/").pop()] : schema;
const example = (method, path, operation) => {
  const content = operation.requestBody?.content ?? {}, types = Object.keys(content), form = content["multipart/form-data"];
  const fields = form ? Object.keys(resolve(form.schema).properties).map(name => name === "image" ? " -F image=@image.jpg" : " -F " + name + "=1").join("") : "";
  const body = form ? fields : types.length ? " -H 'Content-Type: application/json' -d '" + JSON.stringify(resolve(content[types[0]].schema).examples?.[0] ?? {}) + "'" : "";
  return "curl" + (method === "post" ? " -X POST" : "") + body + " " + location.origin + path;
};
for (const [path, methods] of Object.entries(spec.paths)) for (const [method, operation] of Object.entries(methods)) {
  const list = make("ul");
  for (const parameter of operation.parameters ?? []) list.append(make("li", { textContent: parameter.name + " (" + parameter.in + "): " + (parameter.description ?? parameter.schema.description) }));
  for (const [status, answer] of Object.entries(operation.responses)) list.append(make("li", { textContent: status + ": " + answer.description }));
  document.getElementById("paths").append(make("section", { className: "card" }, make("h2", { textContent: method.toUpperCase() + " " + path }), make("p", { textContent: operation.description ?? operation.summary }), make("pre", { textContent: example(method, path, operation) }), list));
}
