"""Charts as Vega-Lite specifications: the page draws them in the browser, `lowrank figure` into files."""
