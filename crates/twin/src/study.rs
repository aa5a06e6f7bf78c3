//! Several policies on one trace.

use kvist_schedule::{
    Pipeline, PipelineConfig, Step,
    catalogue::{Stage, names},
};
use serde::Serialize;

use crate::{MeshReport, MeshSettings, mesh::run_mesh, trace::TraceRequest};

/// Policies that are no scorer's name: presets, and rules to compare with.
pub const NAMED_POLICIES: [&str; 4] = ["kvist", "foretoken", "most_overlap", "lowest_sum"];

/// A pipeline by a policy's name: a preset, the name of a scorer (with its defaults, and `max`), `most_overlap` (the most
/// cached blocks whatever the load: the bad example), or `lowest_sum` (backlog and uncached tokens, without more).
///
/// # Errors
/// There is no such policy; the error lists those that there are.
pub fn policy(name: &str) -> Result<Pipeline, String> {
    let config = match name {
        "kvist" | "cost" => Ok(PipelineConfig::default()),
        "most_overlap" => Ok(PipelineConfig::best_by(Step::new("kv_least_loaded"))),
        "lowest_sum" => Ok(PipelineConfig::best_by(
            Step::new("cost").with("recomputeWeight", 1.0).with("decodeWeight", 0.0).with("pressureSeconds", 0.0),
        )),
        "foretoken" => PipelineConfig::preset(name),
        scorer if names(Stage::Scorer).contains(&scorer) => Ok(PipelineConfig::best_by(Step::new(scorer))),
        _ => {
            let valid = [&NAMED_POLICIES[..], &names(Stage::Scorer)].concat().join(", ");
            return Err(format!("unknown policy \"{name}\"; valid: {valid}"));
        }
    };
    config.and_then(Pipeline::new).map_err(|error| error.to_string())
}

/// The settings and what came of each policy.
#[derive(Clone, Debug, Serialize)]
pub struct Study {
    /// The mesh.
    pub settings: MeshSettings,
    /// By policy, in the order asked for.
    pub policies: Vec<MeshReport>,
}

/// Runs a trace through the same mesh once for each policy.
#[must_use]
pub fn study(settings: &MeshSettings, trace: &[TraceRequest], policies: &[(String, Pipeline)]) -> Study {
    let reports = policies.iter().map(|(name, pipeline)| run_mesh(settings, trace, name, pipeline)).collect();
    Study { settings: settings.clone(), policies: reports }
}
