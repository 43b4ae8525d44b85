"""Every table of the paper, twice: as printed, and as it should have been.

settings.py has the names that cells are made of, paper_tables.py the rows and columns of each table, printed.py what
the paper printed. carrying.py runs cells, and kept_lines.py keeps their results.
"""
