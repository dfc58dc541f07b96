"""The report: one HTML file with claims, figures and all runs, which needs no network and no server."""
