// All views, by the names that js/router.js gives them.

import * as compare from "./compare.js";
import * as completion from "./completion.js";
import * as config from "./config.js";
import * as curves from "./curves.js";
import * as group from "./group.js";
import * as evaluation from "./eval.js";
import * as machine from "./machine.js";
import * as now from "./now.js";
import * as runs from "./runs.js";
import * as search from "./search.js";
import * as step from "./step.js";

export const views = { compare, completion, config, curves, group, eval: evaluation, machine, now, runs, search, step };
