//! A request that is divided: a prefill worker computes the prompt and keeps its KV, a decode worker fetches it and
//! answers. What connects the two is opaque parameters, which come from the one engine and go to the other.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use kvist_errors::{Code, KvistError};
use kvist_proto::engine::v1::{EngineRequest, Finished, KvTransferParameters, StopConditions};
use prost_types::{Struct, Value, value::Kind};

use crate::{
    explain::{Ending, SeenDecision},
    metrics::RouterMetrics,
    parts::Behind,
    select::Placement,
    target::WorkerConnection,
};

/// Connectors that find KV by the prompt alone, in a folder: neither engine is told anything.
const WITHOUT_PARAMETERS: [&str; 1] = ["ExampleConnector"];

/// A lease on blocks of a prefill engine. Dropped, it frees them: whoever needed them has them, or nobody will.
#[derive(Debug)]
struct Lease {
    connection: Arc<WorkerConnection>,
    id: String,
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.connection.link.release(std::mem::take(&mut self.id));
    }
}

#[derive(Debug)]
enum Stage {
    /// The prompt is being computed.
    Prefill { decode: Option<(Arc<SeenDecision>, Placement)> },
    /// The decode worker has the request, and has not answered yet.
    Waiting { since: Instant },
    /// It answers.
    Answering,
}

/// The state of a divided request beside its present placement. Dropping it frees what is kept for it.
#[derive(Debug)]
pub(crate) struct HandOver {
    stage: Stage,
    connector: String,
    lease: Option<Lease>,
    metrics: RouterMetrics,
    /// Prompt tokens that the prefill engine found in its cache.
    cached_tokens: Option<u32>,
    outcome: &'static str,
}

impl HandOver {
    /// A request begins at a prefill target.
    ///
    /// # Errors
    /// Nobody is behind it after all.
    pub(crate) fn begin(
        prefill: &Placement,
        behind: Behind,
        lease_id: String,
        metrics: &RouterMetrics,
    ) -> Result<Self, KvistError> {
        let Some(connection) = &prefill.node.connection else {
            return Err(KvistError::new(Code::Internal, "a target without a connection was chosen"));
        };
        let layout = prefill.node.description().and_then(|description| description.kv_layout.clone());
        let decode = Some((behind.decision, behind.placement?));
        Ok(Self {
            stage: Stage::Prefill { decode },
            connector: layout.map(|layout| layout.connector).unwrap_or_default(),
            lease: Some(Lease { connection: Arc::clone(connection), id: lease_id }),
            metrics: metrics.clone(),
            cached_tokens: None,
            outcome: "cancelled",
        })
    }

    /// Whether the prompt is being computed, and what the engine says is no part of the answer.
    pub(crate) fn is_prefill(&self) -> bool {
        matches!(self.stage, Stage::Prefill { .. })
    }

    /// Prompt tokens that had not to be computed by anybody.
    pub(crate) fn cached_tokens(&self) -> Option<u32> {
        self.cached_tokens
    }

    /// Makes of a request the one that computes its prompt and keeps its KV. One token is generated, since engines
    /// compute no prompt for nothing, and it is thrown away: the decode engine draws it again.
    pub(crate) fn ask_to_keep(&self, request: &mut EngineRequest) {
        let lease_id = self.lease.as_ref().map(|lease| lease.id.clone()).unwrap_or_default();
        request.sampling = None;
        request.structured_output = None;
        request.stop = Some(StopConditions { max_tokens: Some(1), ignore_eos: true, ..StopConditions::default() });
        let parameters = if WITHOUT_PARAMETERS.contains(&self.connector.as_str()) {
            Struct::default()
        } else {
            flags([("do_remote_decode", true), ("do_remote_prefill", false)])
        };
        let connector = self.connector.clone();
        request.kv_transfer = Some(KvTransferParameters { connector, lease_id, parameters: Some(parameters) });
    }

    /// The prompt is computed: the decode target, and what it is to be told. None for the parameters when the prefill
    /// engine kept nothing, so that the decode engine computes the prompt itself.
    pub(crate) fn prefilled(
        &mut self,
        finished: &mut Finished,
    ) -> Option<(Arc<SeenDecision>, Placement, Option<KvTransferParameters>)> {
        self.cached_tokens = finished.receipt.as_ref().map(|receipt| receipt.cached_tokens);
        let next = Stage::Waiting { since: Instant::now() };
        let Stage::Prefill { decode } = std::mem::replace(&mut self.stage, next) else { return None };
        let (decision, placement) = decode?;
        let kept = match finished.kv_transfer.take() {
            None if WITHOUT_PARAMETERS.contains(&self.connector.as_str()) => {
                let connector = self.connector.clone();
                Some(KvTransferParameters { connector, parameters: Some(Struct::default()), ..Default::default() })
            }
            kept => kept,
        };
        if kept.is_none() {
            self.lease = None;
        }
        Some((decision, placement, kept))
    }

    /// The decode engine has drawn its first token, so it has the KV.
    pub(crate) fn answered(&mut self) {
        if let Stage::Waiting { since } = std::mem::replace(&mut self.stage, Stage::Answering) {
            self.metrics.hand_over_seconds.observe(since.elapsed().as_secs_f64());
            self.outcome = "completed";
            self.lease = None;
        }
    }

    /// The prefill worker has more to do than was known, and the request is placed anew.
    pub(crate) fn refused(&mut self) {
        self.outcome = "refused";
    }

    /// Its part at the present worker has failed.
    pub(crate) fn failed(&mut self) {
        self.outcome = match self.stage {
            _ if self.outcome == "refused" => self.outcome,
            Stage::Prefill { .. } => "prefill_failed",
            Stage::Waiting { .. } => "decode_failed",
            Stage::Answering => self.outcome,
        };
    }
}

impl Drop for HandOver {
    fn drop(&mut self) {
        if let Stage::Prefill { decode: Some((decision, _)) } = &self.stage {
            let _ = decision.ending.set(Ending { outcome: "not_begun", ..Ending::default() });
        }
        self.metrics.count_hand_over(self.outcome);
    }
}

fn flags<const N: usize>(flags: [(&str, bool); N]) -> Struct {
    let value = |flag| Value { kind: Some(Kind::BoolValue(flag)) };
    Struct { fields: flags.into_iter().map(|(name, flag)| (name.to_owned(), value(flag))).collect() }
}

/// Names a lease: by the request, and by its attempt, so that a late release of an earlier one frees nothing else.
pub(crate) fn lease_id(request_id: &str, attempt: u32) -> String {
    format!("{request_id}.{attempt}")
}

/// How long a first token is expected to take.
pub(crate) fn expected_first_token(decision: &SeenDecision) -> Option<Duration> {
    decision.predicted_first_token_seconds().and_then(|seconds| Duration::try_from_secs_f64(seconds).ok())
}
