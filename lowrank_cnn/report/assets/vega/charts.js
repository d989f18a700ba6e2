import { parse, View } from "vega";
import { compile } from "vega-lite";
import { expressionInterpreter } from "vega-interpreter";
window.vegaCharts = { parse, View, compile, expressionInterpreter };
