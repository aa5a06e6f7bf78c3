//! Every algorithm by name, with its parameters: what configuration is held against and the reference page is made of.

use crate::{
    config::ConfigError,
    cost::{DECODE_WEIGHT, PRESSURE_SECONDS, RECOMPUTE_WEIGHT},
};

/// A stage of the pipeline.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// Leaves out what must not serve.
    Filter,
    /// Says how good each is.
    Scorer,
    /// Chooses one.
    Picker,
}

impl Stage {
    /// The stage as configuration spells it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Filter => "filter",
            Self::Scorer => "scorer",
            Self::Picker => "picker",
        }
    }
}

/// What happens to a value outside a parameter's range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OutOfRange {
    /// The configuration is refused.
    Refuse,
    /// The default is used, as for null.
    Default,
}

/// One parameter; all are numbers.
#[derive(Clone, Copy, Debug)]
pub struct Parameter {
    /// As configuration spells it.
    pub name: &'static str,
    /// Used when it is left out.
    pub default: f64,
    /// Smallest value.
    pub least: f64,
    /// Largest value.
    pub most: f64,
    /// What happens outside.
    pub out_of_range: OutOfRange,
    /// One sentence, with the unit.
    pub meaning: &'static str,
}

/// What a scorer's values are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Values {
    /// No scorer, or one whose scores are no numbers in [0, 1]: it stands alone.
    Own,
    /// Numbers in [0, 1], which combine with weights and go with `softmax`.
    Unit,
    /// The winner has 1 and all others 0: it stands alone and needs the picker `max`.
    Winner,
}

/// One algorithm.
#[derive(Clone, Copy, Debug)]
pub struct Algorithm {
    /// Where it stands in the pipeline.
    pub stage: Stage,
    /// As configuration spells it.
    pub name: &'static str,
    /// What its scores are.
    pub values: Values,
    /// What it does.
    pub meaning: &'static str,
    /// In this order.
    pub parameters: &'static [Parameter],
}

const fn parameter(name: &'static str, default: f64, least: f64, most: f64, meaning: &'static str) -> Parameter {
    Parameter { name, default, least, most, out_of_range: OutOfRange::Refuse, meaning }
}

const fn lenient(name: &'static str, default: f64, least: f64, most: f64, meaning: &'static str) -> Parameter {
    Parameter { out_of_range: OutOfRange::Default, ..parameter(name, default, least, most, meaning) }
}

const fn algorithm(
    stage: Stage,
    name: &'static str,
    values: Values,
    meaning: &'static str,
    parameters: &'static [Parameter],
) -> Algorithm {
    Algorithm { stage, name, values, meaning, parameters }
}

const INFINITE: f64 = f64::INFINITY;

/// All algorithms.
pub const ALGORITHMS: &[Algorithm] = &[
    algorithm(
        Stage::Filter,
        "allow_all",
        Values::Own,
        "Leaves out only targets that take no requests at all, such as draining ones.",
        &[],
    ),
    algorithm(
        Stage::Filter,
        "saturation",
        Values::Own,
        "Leaves out own targets whose saturation is above the threshold: (running + waiting) / requests that run at once; \
         without a report, requests in flight / 4. Foreign endpoints are never saturated.",
        &[parameter("threshold", 0.85, 0.0, INFINITE, "Share of the requests that run at once.")],
    ),
    algorithm(
        Stage::Filter,
        "breaker",
        Values::Own,
        "Leaves out targets whose breaker is open. Where that would leave nobody, all pass.",
        &[],
    ),
    algorithm(
        Stage::Filter,
        "capability",
        Values::Own,
        "Leaves out targets that cannot serve the request: context too short, adapter or modality missing, no constrained \
         output.",
        &[],
    ),
    algorithm(
        Stage::Scorer,
        "cost",
        Values::Own,
        "Expected seconds to the first token, and what the choice takes from others; less is better. See \
         [How Kvist chooses](../concepts/how-kvist-chooses.md).",
        &[
            parameter(
                "recomputeWeight",
                RECOMPUTE_WEIGHT,
                1.0,
                100.0,
                "What a second of prefill counts, since it also delays those behind it and evicts blocks that others would \
                 hit. 1 counts this request alone.",
            ),
            parameter(
                "decodeWeight",
                DECODE_WEIGHT,
                0.0,
                100.0,
                "What a second by which this request and the running ones slow each other's decoding counts.",
            ),
            parameter(
                "pressureSeconds",
                PRESSURE_SECONDS,
                0.0,
                100.0,
                "Scale of the barrier s·k/(1 − k), where k is the share of the KV pool in use with this request.",
            ),
        ],
    ),
    algorithm(
        Stage::Scorer,
        "kv_least_loaded",
        Values::Own,
        "Longest cached prefix; then the tier it lies in (device 4, host 3, disk 2, external 1); then its locality (in the \
         worker's machine 2, elsewhere 1); then the lower load. A prefill round adds the least decode load behind the \
         target; a decode round leaves the cache out.",
        &[],
    ),
    algorithm(Stage::Scorer, "least_loaded", Values::Own, "The lower load: requests that run and wait.", &[]),
    algorithm(Stage::Scorer, "uniform", Values::Unit, "All are equal: 1.", &[]),
    algorithm(
        Stage::Scorer,
        "queue_depth",
        Values::Unit,
        "(max − x) / (max − min) of the waiting requests x; all 1 when equal; 0.5 without a report.",
        &[],
    ),
    algorithm(
        Stage::Scorer,
        "running_request",
        Values::Unit,
        "(max − x) / (max − min) of the running requests x; all 1 when equal; 0.5 without a report.",
        &[],
    ),
    algorithm(
        Stage::Scorer,
        "kv_cache_utilization",
        Values::Unit,
        "1 − share of the KV pool in use; 0.5 without a report.",
        &[],
    ),
    algorithm(
        Stage::Scorer,
        "active_request",
        Values::Unit,
        "1 up to idleThreshold requests of this router in flight there; else (max − x) / max · maxBusyScore.",
        &[
            parameter("idleThreshold", 0.0, 0.0, INFINITE, "Requests in flight up to which a target counts as idle."),
            lenient("maxBusyScore", 1.0, 0.0, 1.0, "Best score of a target that is not idle."),
        ],
    ),
    algorithm(
        Stage::Scorer,
        "token_load",
        Values::Unit,
        "1 − min(t, T)/T, where t = this router's tokens in flight there + uncached tokens of this prompt.",
        &[lenient(
            "queueThresholdTokens",
            4_194_304.0,
            f64::MIN_POSITIVE,
            INFINITE,
            "T: tokens at which the score is 0.",
        )],
    ),
    algorithm(
        Stage::Scorer,
        "prefix",
        Values::Unit,
        "w·min(1, m·b/s)² + (1 − w)·m/t, where m = matched blocks, b = block size, t = whole blocks of the prompt; 0 without \
         cache knowledge and in decode and encoder rounds.",
        &[
            parameter("matchLengthWeight", 0.0, 0.0, 1.0, "w: weight of the matched length beside the matched share."),
            parameter("matchLengthScaleTokens", 8192.0, 1.0, INFINITE, "s: matched tokens that count in full."),
        ],
    ),
    algorithm(
        Stage::Scorer,
        "no_hit_lru",
        Values::Unit,
        "Spreads cold prompts: targets never used for one first, then the longest unused: max(0, 1 − rank/(n − 1)). With a \
         cache hit on any target, all have 0.5 and nothing is remembered.",
        &[lenient("lruSize", 1024.0, 1.0, 1_048_576.0, "Targets that are remembered.")],
    ),
    algorithm(
        Stage::Scorer,
        "load_aware",
        Values::Own,
        "0.5 without waiting requests, else 0.5·(1 − min(w, threshold)/threshold); −1 when their number w is unknown.",
        &[parameter("threshold", 128.0, 1.0, INFINITE, "Waiting requests at which the score is 0.")],
    ),
    algorithm(
        Stage::Scorer,
        "two_tier",
        Values::Winner,
        "The least loaded while active requests are out of balance (max − min above balance_abs_threshold and max above \
         balance_rel_threshold · min); else the longest prefix on the device if it is more than cache_threshold of the \
         prompt; else the least loaded. The winner has 1, all others 0. Needs the picker `max`.",
        &[
            parameter("cache_threshold", 0.5, 0.0, 1.0, "Share of the prompt's blocks above which the cache decides."),
            parameter("balance_abs_threshold", 32.0, 0.0, INFINITE, "Requests."),
            parameter("balance_rel_threshold", 1.1, 1.0, INFINITE, "Ratio of the most to the fewest requests."),
        ],
    ),
    algorithm(
        Stage::Scorer,
        "session",
        Values::Unit,
        "A session stays on its target, which consistent hashing of its id chooses: 1 for the first in its order that has \
         room, less for the next; 0 without room. Room: one more request stays within loadBound times the mean. 0.5 for \
         requests without a session.",
        &[parameter("loadBound", 1.25, 1.0, INFINITE, "Times the mean number of active requests.")],
    ),
    algorithm(
        Stage::Scorer,
        "round_robin",
        Values::Unit,
        "Each in turn: 1 for the target not picked for the longest time, down to 0. As a picker the name is refused.",
        &[],
    ),
    algorithm(
        Stage::Picker,
        "max",
        Values::Own,
        "The best; one at random of those within epsilon of it, so that routers which see the same do not all choose alike.",
        &[
            parameter("epsilon", 0.0, 0.0, INFINITE, "In the unit of the score: seconds for `cost`."),
            parameter(
                "epsilonShare",
                0.0,
                0.0,
                1.0,
                "The same as a share of the best score; the larger of both counts.",
            ),
            parameter(
                "epsilonMost",
                INFINITE,
                0.0,
                INFINITE,
                "Most that epsilonShare comes to, in the unit of the score.",
            ),
        ],
    ),
    algorithm(
        Stage::Picker,
        "gamble_sampling",
        Values::Own,
        "Draws by rank: the weight of a target is n − its position in the order of scores; equals all have the weight of \
         their first. Nobody is excluded.",
        &[],
    ),
    algorithm(
        Stage::Picker,
        "power_of_two_choices",
        Values::Own,
        "Draws two different targets and takes the better; one of both at random when they are equal.",
        &[],
    ),
    algorithm(
        Stage::Picker,
        "softmax",
        Values::Own,
        "Draws in proportion to exp(score / temperature). Goes with scorers whose values are in [0, 1].",
        &[parameter("temperature", 0.1, 1e-6, INFINITE, "Smaller is greedier.")],
    ),
];

/// The algorithm of a stage and name.
///
/// # Errors
/// There is none; the error lists those that there are.
pub fn find(stage: Stage, name: &str) -> Result<&'static Algorithm, ConfigError> {
    let mut of_stage = ALGORITHMS.iter().filter(|algorithm| algorithm.stage == stage);
    of_stage.find(|algorithm| algorithm.name == name).ok_or_else(|| {
        let valid = names(stage).join(", ");
        let hint = if stage == Stage::Picker && name == "round_robin" {
            " (round_robin is a scorer; with picker max it takes each in turn)"
        } else {
            ""
        };
        ConfigError::new(format!("unknown {} \"{name}\"{hint}; valid: {valid}", stage.name()))
    })
}

/// Names of all algorithms of a stage.
#[must_use]
pub fn names(stage: Stage) -> Vec<&'static str> {
    ALGORITHMS.iter().filter(|algorithm| algorithm.stage == stage).map(|algorithm| algorithm.name).collect()
}

fn number(value: f64) -> String {
    if value.is_infinite() { "∞".to_owned() } else { format!("{value}") }
}

/// The reference page of all algorithms, as Markdown.
#[must_use]
pub fn reference_page() -> String {
    let mut page = String::from(
        "# Routing algorithms\n\n\
         This page is generated from `crates/schedule/src/catalogue.rs` by `./task gen`.\n\n\
         A pipeline is `filters`, `scorers` and one `picker`, each `{algorithm, parameters}`; a scorer may have a `weight`. \
         Several scorers are added up by weight, which needs values in [0, 1]; so does the picker `softmax`. An unknown name, \
         an unknown parameter or a value outside its range stops the start, and the message lists what is valid.\n\n\
         ```json\n",
    );
    page.push_str(&serde_json::to_string_pretty(&crate::PipelineConfig::default()).unwrap_or_default());
    page.push_str(
        "\n```\n\nis the default, also called preset `kvist`. `{\"preset\": \"foretoken\"}` is filter `allow_all`, scorer \
         `kv_least_loaded`, picker `gamble_sampling`.\n",
    );
    for stage in [Stage::Filter, Stage::Scorer, Stage::Picker] {
        let title = match stage {
            Stage::Filter => "Filters",
            Stage::Scorer => "Scorers",
            Stage::Picker => "Pickers",
        };
        page.push_str(&format!("\n## {title}\n"));
        for algorithm in ALGORITHMS.iter().filter(|algorithm| algorithm.stage == stage) {
            page.push_str(&format!("\n### `{}`\n\n{}\n", algorithm.name, algorithm.meaning));
            if stage == Stage::Scorer {
                page.push_str(match algorithm.values {
                    Values::Unit => "\nValues in [0, 1]: combines with others.\n",
                    Values::Own | Values::Winner => "\nStands alone.\n",
                });
            }
            if algorithm.parameters.is_empty() {
                continue;
            }
            page.push_str("\n| parameter | default | range | meaning |\n|---|---|---|---|\n");
            for parameter in algorithm.parameters {
                let range = if parameter.least == f64::MIN_POSITIVE {
                    "above 0".to_owned()
                } else {
                    format!("{} to {}", number(parameter.least), number(parameter.most))
                };
                let outside = match parameter.out_of_range {
                    OutOfRange::Refuse => "",
                    OutOfRange::Default => "; else the default",
                };
                page.push_str(&format!(
                    "| `{}` | {} | {range}{outside} | {} |\n",
                    parameter.name,
                    number(parameter.default),
                    parameter.meaning,
                ));
            }
        }
    }
    page
}
