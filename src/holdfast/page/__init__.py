"""A run, or several runs, as a single HTML file that needs no server and no network.

`facts` collects what the page shows as JSON, with its curves in order and bounded; `document` puts the JSON, the style
sheet and the scripts into one file. In the browser `chart.js` draws charts, `page.js` all else. No torch, no
lease: a page only reads. Start reading at `facts.collect`; ``holdfast page`` (cli/page.py) is the only user.
"""
