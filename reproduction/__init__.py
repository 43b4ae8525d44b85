"""Every table of the paper, twice: as printed, and as it should have been. A client of fnrfl: `python -m reproduction`.

catalogue.py knows the tables, store.py the results, running.py computes what is missing, tables.py and claims.py make
values of results, and render.py, page.py and figures.py show them. data/ has the names, keys and words.
"""
