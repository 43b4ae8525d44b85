"""Each client's accuracy on the test examples that it brought, line by line."""

from __future__ import annotations

from fnrfl.results.report.client_view import CLIENTS
from fnrfl.results.report.groups import Panel
from fnrfl.results.report.numbers import as_percent
from fnrfl.results.report.tables import Column, Table, TableCell, over_seeds


def site_table(panel: Panel) -> Table | None:
    """A row for each client and a column for each line; None where no client brought test examples.

    Lines of one data set have the same clients where the scenario takes those of the data.
    """
    scored = [group for group in panel.groups if group.runs[0].rounds[-1].get("per_site")]
    if not scored:
        return None
    first = scored[0].runs[0]
    scored = [group for group in scored if group.runs[0].client_names == first.client_names]
    tests = first.about.get("site_test_counts", [])
    columns = (
        Column("client", number=False),
        Column("examples", "with which it trains"),
        *([Column("test examples", "that it brought")] if tests else []),
        *(Column(group.label, "accuracy, % on the test examples that the client brought") for group in scored),
    )
    rows = []
    for client, name in enumerate(first.client_names[:CLIENTS]):
        row = [TableCell(name, client), TableCell(f"{sum(first.counts[client]):,}", sum(first.counts[client]))]
        row += [TableCell(f"{count:,}", count) for count in tests[client : client + 1]]
        for group in scored:
            row.append(over_seeds((run.rounds[-1]["per_site"][client] for run in group.runs), as_percent))
        rows.append(tuple(row))
    return Table(columns, tuple(rows))
