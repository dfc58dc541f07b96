"""The paper's theory in figures: each study computes, draws, and judges a claim."""
