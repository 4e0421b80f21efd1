"""The page's modules as one script, and its files as one document."""

import json
import re
import shutil
import subprocess

import pytest

from cohort_view.export import BundleError, bundle_modules, escape_script

MODULES = {
    "js/main.js": (
        'import * as lib from "./lib.js";\nimport {\n  twice as double,\n  Box,\n} from "./lib.js";\n'
        'import plot from "../vendor/plot.js";\nimport "./effect.js";\n'
        "console.log(JSON.stringify([double(lib.three), new Box().size, plot(1), globalThis.effect, lib.later]));\n"
    ),
    "js/lib.js": (
        'import { one } from "../vendor/plot.js";\nexport const three = 2 + one;\n'
        "export function twice(x) { return 2 * x; }\n"
        "export class Box { size = three; }\nconst hidden = 5;\nexport { hidden as later };\n"
    ),
    "js/effect.js": "globalThis.effect = true;\n",
    "vendor/plot.js": (
        "/*\nexport function old() {}\n*/\n/* License */\nconst one = 1;\nfunction draw(x) { return x + one; }\n"
        "export { draw as default, one };\n"
    ),
}


def test_modules_become_one_script_in_the_order_of_their_imports() -> None:
    script = bundle_modules("js/main.js", MODULES.__getitem__)
    places = [script.index(f"// {name}\n") for name in ("vendor/plot.js", "js/lib.js", "js/effect.js", "js/main.js")]
    assert places == sorted(places)
    assert script.count("// vendor/plot.js\n") == script.count("/* License */") == 1
    assert "old" not in script
    assert not re.search(r"^(import|export)\b", script, re.M)
    assert "const { twice: double, Box, } = $module1;" in script


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_the_script_does_what_the_modules_do() -> None:
    script = bundle_modules("js/main.js", MODULES.__getitem__)
    done = subprocess.run(["node", "-e", script], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [6, 3, 2, True, 5]


@pytest.mark.parametrize(
    "line",
    [
        'export * from "./lib.js";',
        "export default 3;",
        "export let x = 1;",
        'const x = await import("./lib.js");',
        "console.log(import.meta.url);",
        'import one, { two } from "./lib.js";',
        'import x from "https://cdn.example/x.js";',
    ],
)
def test_other_forms_raise(line: str) -> None:
    with pytest.raises(BundleError, match=r"main\.js"):
        bundle_modules("main.js", {"main.js": f"{line}\n", "lib.js": ""}.__getitem__)


def test_circles_raise() -> None:
    modules = {"a.js": 'import { b } from "./b.js";\n', "b.js": 'import { a } from "./a.js";\n'}
    with pytest.raises(BundleError, match=r"a\.js -> b\.js -> a\.js"):
        bundle_modules("a.js", modules.__getitem__)


def test_nothing_ends_a_script_element() -> None:
    assert escape_script('x = "</script>"; y = /<\\/SCRIPT/; // <!-- </Script') == (
        'x = "<\\/script>"; y = /<\\/SCRIPT/; // <\\!-- <\\/Script'
    )
