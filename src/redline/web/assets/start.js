// What this page is: a report has its document in it; a page of the dashboard says where to ask.

const enclosed = document.querySelector("#document");
if (enclosed) {
  const found = JSON.parse(enclosed.textContent);
  (found.kind === "trace" ? openTrace : openReport)(found);
}
else if (document.body.dataset.run) followRun(document.body.dataset.run);
else followList();
