"""Where runs and results are kept: one SQLite file, half-done runs beside it, tables for other tools."""
