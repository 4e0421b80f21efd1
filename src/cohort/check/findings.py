"""What can be found in a file: stable codes, each with its severity and meaning. `docs/check.md` is made of this."""

from dataclasses import dataclass
from typing import Any, Literal

Severity = Literal["error", "warning"]


@dataclass(frozen=True, slots=True)
class Rule:
    """One kind of finding."""

    severity: Severity
    title: str
    explanation: str


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing found in one file."""

    code: str
    field: str | None  # the key that it is about
    message: str
    nearest: tuple[str, ...] = ()  # changes that work, nearest first

    @property
    def severity(self) -> Severity:
        """Of its code."""
        return RULES[self.code].severity

    def as_json(self) -> dict[str, Any]:
        """The finding as `--json` prints it."""
        return {
            "code": self.code,
            "severity": self.severity,
            "field": self.field,
            "message": self.message,
            "nearest": list(self.nearest),
        }


RULES: dict[str, Rule] = {
    "CHK001": Rule(
        "error",
        "The file cannot be read",
        "It is missing, not text, too large, not valid, refers to itself, or is none of the formats below.",
    ),
    "CHK002": Rule(
        "error",
        "The framework refuses to start",
        "With the number of GPUs that the file or `--launch` names, or, where neither does, with every number of "
        "`--world-sizes`. The message is the framework's own.",
    ),
    "CHK003": Rule(
        "warning",
        "It starts with some numbers of GPUs only",
        "The file does not say how many processes train it, and with some numbers of `--world-sizes` it would be "
        "refused.",
    ),
    "CHK004": Rule(
        "warning",
        "Something could not be read",
        "A variable that the shell script does not assign, a computed argument, a recipe. The rest is checked; where a "
        "number of the batch is missing, whether it starts is not judged.",
    ),
    "CHK005": Rule(
        "warning",
        "A key has no effect",
        "This version does not know it and drops it without a word, or another key makes it meaningless.",
    ),
    "CHK006": Rule("error", "A key is refused", "This version does not know it and stops there."),
    "CHK007": Rule(
        "warning", "A key has another name", "This version calls it otherwise; the old name is dropped or will be."
    ),
    "CHK008": Rule("error", "Keys contradict each other", "Each is fine by itself, and together they stop the run."),
    "CHK009": Rule(
        "warning",
        "Evaluation would fail later",
        "The global evaluation batch does not hold whole groups. That is refused as soon as evaluation is on.",
    ),
    "CHK010": Rule(
        "error", "A value does not fit its key", "Such as text, or a number below 1, where a count is needed."
    ),
    "CHK011": Rule("warning", "GPUs stand idle", "More GPUs are visible than the run uses."),
    "CHK012": Rule(
        "error",
        "GPUs are used twice",
        "Training and the sampling server have the same GPU, or there are more processes than GPUs.",
    ),
    "CHK013": Rule(
        "warning",
        "Lengths exceed the server's context",
        "Prompt and completion together are longer than what the sampling server holds: completions end early, or "
        "requests are refused.",
    ),
    "CHK014": Rule(
        "error",
        "A group of one",
        "`num_generations: 1` is accepted here, and a completion without peers has no advantage over them: nothing is "
        "learned, or something else than GRPO.",
    ),
    "CHK015": Rule(
        "warning",
        "CISPO's clip is absolute",
        "`epsilon_high` is CISPO's cap of the importance weight itself, not of its distance from 1. At 1 or less every "
        "on-policy weight is cut down to it, and so is the gradient.",
    ),
    "CHK016": Rule(
        "warning",
        "The loss is scaled wrongly",
        "In these versions the normalizer of some losses spans the generation batch while the gradient is accumulated "
        "over another number of steps.",
    ),
    "CHK017": Rule(
        "error",
        "A rule of TRL 0.18 and 0.19 lets it pass by mistake",
        "Operator precedence makes the check accept a generation batch smaller than one micro-step of all processes; "
        "`steps_per_generation` becomes 0, and training divides by it.",
    ),
    "CHK018": Rule(
        "warning",
        "vLLM keeps its memory while training",
        "Training and sampling share each GPU, and vLLM does not sleep meanwhile.",
    ),
    "CHK019": Rule(
        "error",
        "The memory of the GPUs does not suffice",
        "By an estimate, and by more than a tenth. Judged where the GPU is known (`--gpu`, `--gpu-memory`, or Slurm's "
        "options in the file) and the model's shape is (a folder with config.json, or a common model by its id). The "
        "finding says what it assumes.",
    ),
    "CHK020": Rule(
        "warning",
        "The version is not known",
        "The rules of TRL are known from 0.15 to 1.16. Of another version the nearest of these are taken.",
    ),
    "CHK021": Rule(
        "warning",
        "A file is not there",
        "Of a configuration of Cohort: the data, or the file of a reward function, by a path that is relative to the "
        "configuration's folder or to the working directory.",
    ),
}
