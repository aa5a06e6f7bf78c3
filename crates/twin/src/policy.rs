//! Policies by name.

use kvist_schedule::{
    Pipeline, PipelineConfig, Step,
    catalogue::{Stage, names},
};

/// Policies that are no scorer's name: presets, and rules to compare with.
pub const NAMED_POLICIES: [&str; 4] = ["kvist", "foretoken", "most_overlap", "lowest_sum"];

/// A pipeline by a policy's name: a preset, the name of a scorer (with its defaults, and `max`), `most_overlap` (the most
/// cached blocks whatever the load: the bad example), or `lowest_sum` (backlog and uncached tokens, without more).
/// Parameters of the scorer may follow, as in `cost:recomputeWeight=1:decodeWeight=0`.
///
/// # Errors
/// There is no such policy or parameter; the error lists those that there are.
pub fn policy(name: &str) -> Result<Pipeline, String> {
    let mut parts = name.split(':');
    let config = match parts.next().unwrap_or_default() {
        "kvist" | "cost" => Ok(PipelineConfig::default()),
        "most_overlap" => Ok(PipelineConfig::best_by(Step::new("kv_least_loaded"))),
        "lowest_sum" => Ok(PipelineConfig::best_by(
            Step::new("cost").with("recomputeWeight", 1.0).with("decodeWeight", 0.0).with("pressureSeconds", 0.0),
        )),
        "foretoken" => PipelineConfig::preset("foretoken"),
        scorer if names(Stage::Scorer).contains(&scorer) => Ok(PipelineConfig::best_by(Step::new(scorer))),
        unknown => {
            let valid = [&NAMED_POLICIES[..], &names(Stage::Scorer)].concat().join(", ");
            return Err(format!("unknown policy \"{unknown}\"; valid: {valid}"));
        }
    };
    let mut config = config.map_err(|error| error.to_string())?;
    for parameter in parts {
        let (key, value) = parameter.split_once('=').ok_or_else(|| format!("\"{parameter}\" is not NAME=NUMBER"))?;
        let value: f64 = value.parse().map_err(|_| format!("{key} is not a number: {value}"))?;
        config.scorers = config.scorers.into_iter().map(|scorer| scorer.with(key, value)).collect();
    }
    Pipeline::new(config).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_follow_a_name_and_what_is_wrong_is_named() {
        let pipeline = policy("cost:recomputeWeight=1:decodeWeight=0").unwrap();
        let expected = Step::new("cost").with("recomputeWeight", 1.0).with("decodeWeight", 0.0);
        assert_eq!(vec![expected], pipeline.config().scorers);
        assert_eq!(PipelineConfig::default().picker, pipeline.config().picker);
        for (name, word) in [
            ("nosuch", "no_hit_lru"),
            ("cost:nosuch=1", "recomputeWeight"),
            ("cost:recomputeWeight", "NAME=NUMBER"),
            ("cost:recomputeWeight=x", "not a number"),
        ] {
            let message = policy(name).unwrap_err();
            assert!(message.contains(word), "{message}");
        }
    }
}
