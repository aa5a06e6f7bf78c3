//! Several policies on one trace.

use std::time::Duration;

use kvist_schedule::Pipeline;
use serde::{Deserialize, Serialize};

use crate::{
    MeshReport, MeshSettings,
    mesh::run_mesh,
    policy::policy,
    trace::{MadeTrace, TraceRequest, cut, make_bursty, parse_trace, spread_arrivals},
};

/// A trace that is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MadeKind {
    /// All prompts begin with the same 8 blocks and go on with 4 of their own: a system prompt.
    SharedPrefix,
    /// 600 conversations, each turn adding 2 blocks.
    MultiTurn,
}

/// What to study, as JSON.
#[derive(Clone, Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct StudyRequest {
    /// The mesh.
    pub mesh: MeshSettings,
    /// Names of policies; see [`policy`].
    pub policies: Vec<String>,
    /// A trace that is made instead of read: 6,000 requests, 70 a second.
    pub made: Option<MadeKind>,
    /// Spread requests of equal times over the time to the next; see [`spread_arrivals`].
    pub spread: bool,
    /// Leave out requests that come earlier, seconds of the trace; those that are left begin at 0.
    pub from_seconds: f64,
    /// Leave out requests that come then or later; none for no end.
    pub until_seconds: Option<f64>,
    /// How many times as fast requests come.
    pub speed: f64,
    /// Let all requests of such a window arrive at its beginning, seconds; 0 leaves them alone.
    pub burst_seconds: f64,
}

impl Default for StudyRequest {
    fn default() -> Self {
        Self {
            mesh: MeshSettings::default(),
            policies: Vec::new(),
            made: None,
            spread: false,
            from_seconds: 0.0,
            until_seconds: None,
            speed: 1.0,
            burst_seconds: 0.0,
        }
    }
}

impl StudyRequest {
    /// Reads the trace, checks everything, and runs it.
    ///
    /// # Errors
    /// Says what is wrong.
    pub fn run(&self, trace: &str) -> Result<Study, String> {
        let mesh = &self.mesh;
        if mesh.workers == 0 || mesh.routers == 0 || mesh.engine.blocks == 0 {
            return Err("workers, routers and blocks must be at least 1".to_owned());
        }
        if !(mesh.engine.prefill_tokens_per_second > 0.0 && mesh.engine.prefill_tokens_per_second.is_finite()) {
            return Err("prefill_tokens_per_second must be above 0".to_owned());
        }
        if !(self.speed > 0.0 && self.speed.is_finite()) {
            return Err("speed must be above 0".to_owned());
        }
        if self.policies.is_empty() {
            return Err("no policy is named".to_owned());
        }
        let policies =
            self.policies.iter().map(|name| Ok((name.clone(), policy(name)?))).collect::<Result<Vec<_>, String>>()?;
        let made = MadeTrace { seed: mesh.seed, requests: 6000, requests_per_second: 70.0, output_tokens: 20 };
        let mut trace = match self.made {
            Some(MadeKind::SharedPrefix) => made.shared_prefix(8, 4),
            Some(MadeKind::MultiTurn) => made.multi_turn(600, 2),
            None => parse_trace(trace).map_err(|error| error.to_string())?,
        };
        cut(&mut trace, self.from_seconds, self.until_seconds);
        if trace.is_empty() {
            return Err("no request of the trace is within these times".to_owned());
        }
        trace.iter_mut().for_each(|request| request.at = request.at.div_f64(self.speed));
        if self.spread {
            spread_arrivals(&mut trace);
        }
        if self.burst_seconds > 0.0 {
            make_bursty(&mut trace, Duration::try_from_secs_f64(self.burst_seconds).unwrap_or_default());
        }
        Ok(study(mesh, &trace, &policies))
    }
}

/// The settings and what came of each policy.
#[derive(Clone, Debug, Serialize)]
pub struct Study {
    /// The mesh.
    pub settings: MeshSettings,
    /// By policy, in the order asked for.
    #[serde(serialize_with = "by_name")]
    pub policies: Vec<MeshReport>,
}

fn by_name<S: serde::Serializer>(reports: &[MeshReport], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_map(reports.iter().map(|report| (&report.policy, report)))
}

/// Runs a trace through the same mesh once for each policy.
#[must_use]
pub fn study(settings: &MeshSettings, trace: &[TraceRequest], policies: &[(String, Pipeline)]) -> Study {
    let reports = policies.iter().map(|(name, pipeline)| run_mesh(settings, trace, name, pipeline)).collect();
    Study { settings: settings.clone(), policies: reports }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_is_json_and_so_is_what_comes_of_it() {
        let text = r#"{"mesh": {"workers": 2, "engine": {"blocks": 64}}, "policies": ["cost", "round_robin"]}"#;
        let request: StudyRequest = serde_json::from_str(text).unwrap();
        let trace = r#"{"timestamp": 0, "input_length": 600, "output_length": 2, "hash_ids": [7, 8]}
            {"timestamp": 900, "input_length": 600, "output_length": 2, "hash_ids": [7, 8]}"#;
        let study = serde_json::to_value(request.run(trace).unwrap()).unwrap();
        // The second finds the first's whole block, one of four references.
        assert_eq!(0.25, study["policies"]["cost"]["hit_rate"]);
        assert_eq!(0.0, study["policies"]["round_robin"]["hit_rate"]);
        assert_eq!(15_000.0, study["settings"]["engine"]["prefill_tokens_per_second"]);
        for (text, word) in [
            (r#"{"policies": ["nosuch"]}"#, "least_loaded"),
            (r#"{"policies": []}"#, "no policy"),
            (r#"{"policies": ["cost"], "mesh": {"workers": 0}}"#, "at least 1"),
            (r#"{"policies": ["cost"], "speed": 0}"#, "speed"),
            (r#"{"policies": ["cost"], "made": "multi_turn", "from_seconds": 1e6}"#, "no request"),
            (r#"{"policies": ["cost"]}"#, "line 1"),
        ] {
            let request: StudyRequest = serde_json::from_str(text).unwrap();
            assert!(request.run("{}").unwrap_err().contains(word), "{text}");
        }
    }
}
