//! A pipeline as it is configured.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::catalogue::{Algorithm, OutOfRange, Stage, Values, find};

/// Why a configuration is refused; says what would be valid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct ConfigError {
    message: String,
    path: String,
}

impl ConfigError {
    pub(crate) fn new(message: impl Into<String>) -> Self {
        Self { message: message.into(), path: String::new() }
    }

    /// The same, of a part of what is configured.
    pub(crate) fn at(mut self, part: &str) -> Self {
        let dot = if self.path.is_empty() || self.path.starts_with('[') { "" } else { "." };
        self.path = format!("{part}{dot}{}", self.path);
        self
    }

    /// Where it is wrong, such as `scorers[1].algorithm`; empty for the whole.
    #[must_use]
    pub fn path(&self) -> &str {
        &self.path
    }
}

/// One stage: an algorithm and its parameters.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Step {
    /// Name of the algorithm.
    pub algorithm: String,
    /// By name; those left out have their defaults.
    #[serde(default, skip_serializing_if = "Map::is_empty")]
    pub parameters: Map<String, Value>,
    /// How much a scorer counts beside others.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub weight: f64,
}

fn one() -> f64 {
    1.0
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde asks for a reference")]
fn is_one(weight: &f64) -> bool {
    *weight == 1.0
}

impl Step {
    /// An algorithm with its default parameters.
    #[must_use]
    pub fn new(algorithm: &str) -> Self {
        Self { algorithm: algorithm.to_owned(), parameters: Map::new(), weight: 1.0 }
    }

    /// With one more parameter.
    #[must_use]
    pub fn with(mut self, name: &str, value: f64) -> Self {
        self.parameters.insert(name.to_owned(), Value::from(value));
        self
    }

    /// The algorithm and the values of its parameters, in its order.
    pub(crate) fn resolve(&self, stage: Stage) -> Result<(&'static Algorithm, Vec<f64>), ConfigError> {
        let algorithm = find(stage, &self.algorithm).map_err(|error| error.at("algorithm"))?;
        let what = format!("{} {}", stage.name(), algorithm.name);
        if let Some(unknown) =
            self.parameters.keys().find(|name| !algorithm.parameters.iter().any(|p| p.name == **name))
        {
            let valid: Vec<&str> = algorithm.parameters.iter().map(|parameter| parameter.name).collect();
            let valid = if valid.is_empty() { "none".to_owned() } else { valid.join(", ") };
            let error = ConfigError::new(format!("{what} has no parameter \"{unknown}\"; valid: {valid}"));
            return Err(error.at(unknown).at("parameters"));
        }
        if stage != Stage::Scorer && self.weight != 1.0 {
            return Err(ConfigError::new(format!("{what} cannot have a weight; only scorers can")).at("weight"));
        }
        let read = |parameter: &crate::catalogue::Parameter| {
            let given = match self.parameters.get(parameter.name) {
                None => return Ok(parameter.default),
                Some(Value::Null) if parameter.out_of_range == OutOfRange::Default => return Ok(parameter.default),
                Some(given) => given,
            };
            let wrong = |why: String| {
                ConfigError::new(format!("{what}: parameter {} {why}", parameter.name))
                    .at(parameter.name)
                    .at("parameters")
            };
            let number = given.as_f64().ok_or_else(|| wrong(format!("must be a number, not {given}")))?;
            if (parameter.least..=parameter.most).contains(&number) {
                return Ok(number);
            }
            match parameter.out_of_range {
                OutOfRange::Default => Ok(parameter.default),
                OutOfRange::Refuse => {
                    Err(wrong(format!("is {number}, and must be from {} to {}", parameter.least, parameter.most)))
                }
            }
        };
        let values = algorithm.parameters.iter().map(read).collect::<Result<_, _>>()?;
        Ok((algorithm, values))
    }
}

/// A whole pipeline; the default is Kvist's own.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PipelineConfig {
    /// All have to let a target pass.
    pub filters: Vec<Step>,
    /// Added up by weight.
    pub scorers: Vec<Step>,
    /// Chooses.
    pub picker: Step,
}

/// Targets whose costs differ by less are equal by default. Far below what one cached block is worth.
pub(crate) const EPSILON_SECONDS: f64 = 0.000_5;

/// The same as a share of the best cost: what predictions are off by anyway. Routers that see the same then choose
/// differently where little depends on it; where a cache makes a target cheap, the margin is as small.
pub(crate) const EPSILON_SHARE: f64 = 0.05;

/// Most of that share: a long prompt is no reason to wait noticeably longer.
pub(crate) const EPSILON_MOST_SECONDS: f64 = 0.1;

/// Names of presets.
pub const PRESETS: [&str; 2] = ["kvist", "foretoken"];

impl Default for PipelineConfig {
    fn default() -> Self {
        Self {
            filters: vec![Step::new("capability"), Step::new("breaker")],
            scorers: vec![Step::new("cost")],
            picker: Step::new("max")
                .with("epsilon", EPSILON_SECONDS)
                .with("epsilonShare", EPSILON_SHARE)
                .with("epsilonMost", EPSILON_MOST_SECONDS),
        }
    }
}

/// What people write: every part may be left out, and a part of one step need not be a list.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Written {
    preset: Option<String>,
    #[serde(alias = "filter")]
    filters: Option<OneOrMore>,
    #[serde(alias = "scorer")]
    scorers: Option<OneOrMore>,
    picker: Option<Step>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum OneOrMore {
    One(Step),
    More(Vec<Step>),
}

impl OneOrMore {
    fn steps(self) -> Vec<Step> {
        match self {
            Self::One(step) => vec![step],
            Self::More(steps) => steps,
        }
    }
}

impl PipelineConfig {
    /// A pipeline that is known by name.
    ///
    /// # Errors
    /// There is none of that name.
    pub fn preset(name: &str) -> Result<Self, ConfigError> {
        match name {
            "kvist" => Ok(Self::default()),
            "foretoken" => Ok(Self {
                filters: vec![Step::new("allow_all")],
                scorers: vec![Step::new("kv_least_loaded")],
                picker: Step::new("gamble_sampling"),
            }),
            _ => {
                let valid = PRESETS.join(", ");
                Err(ConfigError::new(format!("unknown preset \"{name}\"; valid: {valid}")).at("preset"))
            }
        }
    }

    /// A pipeline that scores by one algorithm and takes the best.
    #[must_use]
    pub fn best_by(scorer: Step) -> Self {
        Self { scorers: vec![scorer], picker: Step::new("max"), ..Self::default() }
    }

    /// Reads a configuration value: `{preset, filters, scorers, picker}`. What is left out is the preset's.
    ///
    /// # Errors
    /// The value has another form, or names what there is not. The pipeline as a whole is checked by
    /// [`crate::Pipeline::new`].
    pub fn from_value(value: &Value) -> Result<Self, ConfigError> {
        let written: Written = serde_json::from_value(value.clone()).map_err(|error| {
            ConfigError::new(format!("routing pipeline: {error}; a step is {{algorithm, parameters}}"))
        })?;
        let mut config = Self::preset(written.preset.as_deref().unwrap_or("kvist"))?;
        let has_own_scorers = written.scorers.is_some();
        if let Some(filters) = written.filters {
            config.filters = filters.steps();
        }
        if let Some(scorers) = written.scorers {
            config.scorers = scorers.steps();
        }
        if let Some(picker) = written.picker {
            config.picker = picker;
        } else if has_own_scorers
            && config.picker.algorithm == "max"
            && !config.scorers.iter().any(|s| s.algorithm == "cost")
        {
            // The preset's epsilon is in the seconds of its own scorer.
            config.picker = Step::new("max");
        }
        Ok(config)
    }

    /// In few words, such as `cost, max`; what a decision record states.
    #[must_use]
    pub fn summary(&self) -> String {
        let scorers: Vec<&str> = self.scorers.iter().map(|step| step.algorithm.as_str()).collect();
        format!("{}, {}", scorers.join(" + "), self.picker.algorithm)
    }

    /// Checks which scorers and pickers go together.
    pub(crate) fn check_composition(
        scorers: &[&'static Algorithm],
        picker: &'static Algorithm,
    ) -> Result<(), ConfigError> {
        let odd = scorers.iter().find(|scorer| scorer.values != Values::Unit);
        if let Some(odd) = odd {
            if scorers.len() > 1 {
                return Err(ConfigError::new(format!(
                    "scorer {} stands alone: only scorers with values in [0, 1] combine ({})",
                    odd.name,
                    unit_scorers().join(", ")
                )));
            }
            if picker.name == "softmax" {
                return Err(ConfigError::new(format!(
                    "picker softmax needs a scorer with values in [0, 1] ({}), which {} is not",
                    unit_scorers().join(", "),
                    odd.name
                )));
            }
            if odd.values == Values::Winner && picker.name != "max" {
                return Err(ConfigError::new(format!(
                    "scorer {} needs picker max, not {}: it scores one winner",
                    odd.name, picker.name
                )));
            }
        }
        Ok(())
    }
}

fn unit_scorers() -> Vec<&'static str> {
    let is_unit = |algorithm: &&Algorithm| algorithm.stage == Stage::Scorer && algorithm.values == Values::Unit;
    crate::catalogue::ALGORITHMS.iter().filter(is_unit).map(|algorithm| algorithm.name).collect()
}
