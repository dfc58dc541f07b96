"""From the runs of a study to its result: names, medians, comparisons, and verdicts on the claims of the paper."""
