"""A run, or a folder of runs, as a single HTML file that needs no server and no network.

`facts` collects what the page shows as JSON and bounds its curves; `document` puts the JSON, the style sheet, the
script and the plotting library (Vega, from the package vl-convert-python) into one file. No torch, no lease: a page
only reads. Start reading at `facts.collect`; ``holdfast page`` (cli/page.py) is the only user.
"""
