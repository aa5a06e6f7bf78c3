//! The one line of a finished request.

/// What is said of every request once, when it has ended. Empty texts and `None` are left out of the line. No prompt
/// and no completion text belongs here.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RequestLine {
    /// The request's id.
    pub request_id: String,
    /// The trace it belonged to, as 32 hex digits.
    pub trace_id: Option<String>,
    /// Surface: `http` or `grpc`.
    pub surface: String,
    /// Name of the API key that was used.
    pub tenant: Option<String>,
    /// Model as the client named it.
    pub model: String,
    /// UID of the worker that answered last.
    pub worker: Option<String>,
    /// Rank of its engine.
    pub rank: Option<u32>,
    /// Rule that chose it.
    pub policy: Option<String>,
    /// Placements: 2 after a retry.
    pub attempts: u32,
    /// Whole blocks of the prompt.
    pub prompt_blocks: Option<u64>,
    /// Blocks that the decision expected in the target's cache.
    pub matched_blocks: Option<u64>,
    /// Prompt tokens.
    pub prompt_tokens: Option<u64>,
    /// Prompt tokens that the engine found in its cache.
    pub cached_tokens: Option<u64>,
    /// Generated tokens.
    pub completion_tokens: Option<u64>,
    /// Time in the engine's queue.
    pub queue_ms: Option<f64>,
    /// From arrival to the first token.
    pub time_to_first_token_ms: Option<f64>,
    /// From arrival to the end.
    pub duration_ms: f64,
    /// `stop`, `length`, `cancelled` or `error`.
    pub outcome: String,
    /// Code of the error catalogue.
    pub error_code: Option<String>,
}

impl RequestLine {
    /// Logs the line at info level as `request_finished`.
    pub fn emit(&self) {
        tracing::info!(
            target: "kvist.request",
            outcome = self.outcome.as_str(),
            request_id = self.request_id.as_str(),
            trace_id = self.trace_id.as_deref(),
            surface = self.surface.as_str(),
            tenant = self.tenant.as_deref(),
            model = self.model.as_str(),
            worker = self.worker.as_deref(),
            rank = self.rank,
            policy = self.policy.as_deref(),
            attempts = self.attempts,
            prompt_blocks = self.prompt_blocks,
            matched_blocks = self.matched_blocks,
            prompt_tokens = self.prompt_tokens,
            cached_tokens = self.cached_tokens,
            completion_tokens = self.completion_tokens,
            queue_ms = self.queue_ms,
            time_to_first_token_ms = self.time_to_first_token_ms,
            duration_ms = self.duration_ms,
            error_code = self.error_code.as_deref(),
            "request_finished"
        );
    }
}
