// What this page is: a report has its document in it; a page of the dashboard says where to ask.

const enclosed = document.querySelector("#document");
if (enclosed) openReport(enclosed.textContent);
else if (document.body.dataset.run) followRun(document.body.dataset.run);
else followList();
