"""Runs on a page: `redline report` writes one, `redline dash` serves them live. Both only read a run's folder.

    redline.runs ──► a document (JSON) ──┬──► report.py   inside one HTML file, with script and style
                                         └──► dash.py     what is new since the browser last asked

The page is the same: `assets/*.js` draws the document. What a model wrote is untrusted. It travels as JSON, reaches the page as
text nodes only, and a Content-Security-Policy lets nothing run but our own files. A trace of another program gets a page of
the same looks (traces.py), which the lab fills.
"""
