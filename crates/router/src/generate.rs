//! The one trait by which everything asks for text, and the events it answers with.

use std::{
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Instant,
};

use futures::{Stream, future::BoxFuture};
use kvist_errors::KvistError;
use kvist_proto::{
    engine::v1::{Embedding, FinishReason, SamplingParameters, StopConditions, StructuredOutput},
    events::v1::Receipt,
    router::v1::ModelSummary,
};

/// What comes with a request beside its content.
#[derive(Clone, Debug)]
pub struct RequestContext {
    /// The caller's own id; empty for a generated one.
    pub request_id: String,
    /// When the answer is no longer wanted; none for the router's default.
    pub deadline: Option<Instant>,
    /// The door's span of the request; the router's spans are below it, and it ends no earlier than the request.
    pub span: tracing::Span,
    /// W3C trace context of the caller, which goes on to the worker when no span is recorded; empty when not traced.
    pub traceparent: String,
    /// W3C trace state; empty when none.
    pub tracestate: String,
    /// Name of the API key; empty when none is needed.
    pub caller: Arc<str>,
    /// Salt of the API key, which separates its caches from those of all others; empty for none.
    pub caller_salt: Arc<str>,
    /// By which door it came: `http` or `grpc`.
    pub door: &'static str,
    /// Names a conversation, whose requests prefer one target under policies that know sessions; empty for none.
    pub session_id: String,
    /// Class of the request where its model's admission has classes; empty for the last of them.
    pub class: String,
}

impl RequestContext {
    /// The same for one of several requests that answer one: from the second on, the caller's id gets a number.
    #[must_use]
    pub fn part(&self, number: u32) -> Self {
        let mut part = self.clone();
        if number > 0 && !part.request_id.is_empty() {
            part.request_id = format!("{}-{number}", part.request_id);
        }
        part
    }
}

/// What to go on from.
#[derive(Clone, Debug)]
pub enum Prompt {
    /// Plain text; no template is applied.
    Text(String),
    /// Token ids.
    Tokens(Vec<u32>),
    /// A conversation; the model's chat template is applied.
    Chat(Box<kvist_text::Chat>),
}

impl Prompt {
    /// Bytes of text that have to be rendered and tokenized, roughly.
    #[must_use]
    pub fn text_bytes(&self) -> usize {
        match self {
            Self::Text(text) => text.len(),
            Self::Tokens(_) => 0,
            Self::Chat(chat) => chat.messages.iter().chain(&chat.tools).map(value_bytes).sum(),
        }
    }
}

fn value_bytes(value: &serde_json::Value) -> usize {
    match value {
        serde_json::Value::String(text) => text.len(),
        serde_json::Value::Array(items) => items.iter().map(value_bytes).sum(),
        serde_json::Value::Object(map) => map.iter().map(|(key, item)| key.len() + value_bytes(item)).sum(),
        _ => 4,
    }
}

/// One request, whatever door it came by.
#[derive(Clone, Debug)]
pub struct GenerateInput {
    /// Name of the model.
    pub model: String,
    /// What to go on from.
    pub prompt: Prompt,
    /// How tokens are drawn.
    pub sampling: SamplingParameters,
    /// When generation ends, in tokens.
    pub stop: StopConditions,
    /// Texts that end generation.
    pub stop_strings: Vec<String>,
    /// Whether a stop string that was found is part of the text.
    pub include_stop_string: bool,
    /// Constrained output.
    pub structured_output: Option<StructuredOutput>,
    /// LoRA adapter; empty for the base model.
    pub adapter: String,
    /// Separates caches; empty for the shared cache.
    pub cache_salt: String,
    /// Smaller runs earlier.
    pub priority: i32,
    /// Fields that Kvist does not know and the engine may.
    pub engine_extras: Option<prost_types::Struct>,
    /// Return token ids beside the text.
    pub return_token_ids: bool,
    /// How the answer is taken apart.
    pub form: AnswerForm,
}

/// Which tools may be called.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum ToolChoice {
    /// None: nothing is read as a call.
    #[default]
    None,
    /// The model decides.
    Auto,
    /// At least one.
    Required,
    /// This one, once.
    Named(String),
}

/// How an answer is taken apart; by default it is the text as it was generated.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AnswerForm {
    /// Thoughts are events of their own.
    pub separate_reasoning: bool,
    /// Which of the prompt's tools may be called.
    pub tool_choice: ToolChoice,
    /// At most one call in an answer.
    pub single_call: bool,
    /// Names of the tools whose arguments have to keep to their schema.
    pub strict_tools: Vec<String>,
}

impl GenerateInput {
    /// A request with the engine's defaults.
    #[must_use]
    pub fn new(model: impl Into<String>, prompt: Prompt) -> Self {
        Self {
            model: model.into(),
            prompt,
            sampling: SamplingParameters::default(),
            stop: StopConditions::default(),
            stop_strings: Vec::new(),
            include_stop_string: false,
            structured_output: None,
            adapter: String::new(),
            cache_salt: String::new(),
            priority: 0,
            engine_extras: None,
            return_token_ids: false,
            form: AnswerForm::default(),
        }
    }
}

/// Log-probabilities at one position, with the bytes of the tokens.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenLogprob {
    /// The token.
    pub token_id: u32,
    /// Its bytes.
    pub bytes: Vec<u8>,
    /// Natural logarithm of its probability.
    pub logprob: f32,
    /// The most probable tokens, best first: id, bytes, log-probability.
    pub top: Vec<(u32, Vec<u8>, f32)>,
}

/// New text of one choice.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TextDelta {
    /// Which choice, from 0.
    pub index: u32,
    /// Whole characters.
    pub text: String,
    /// Tokens, when asked for.
    pub token_ids: Vec<u32>,
    /// One for each token, when asked for.
    pub logprobs: Vec<TokenLogprob>,
}

/// New thoughts of one choice.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ReasoningDelta {
    /// Which choice, from 0.
    pub index: u32,
    /// Whole characters.
    pub text: String,
}

/// A part of a tool call of one choice. Calls follow each other.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CallDelta {
    /// Which choice, from 0.
    pub index: u32,
    /// Which call of the choice, from 0.
    pub call: u32,
    /// Id and name, with the first part.
    pub head: Option<CallHead>,
    /// More of its arguments: JSON text once they are complete.
    pub arguments: String,
    /// Whether they are complete.
    pub is_end: bool,
}

/// What a tool call begins with.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CallHead {
    /// Its id.
    pub id: String,
    /// Name of the tool.
    pub name: String,
}

/// How one choice ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChoiceEnd {
    /// Which choice.
    pub index: u32,
    /// Why, in the engine's words: `STOP` or `LENGTH`.
    pub reason: FinishReason,
    /// The stop string that was found; empty for none.
    pub stop_string: String,
    /// The token that ended it.
    pub stop_token_id: Option<u32>,
    /// Tool calls that are complete.
    pub complete_calls: u32,
}

/// What a request used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Tokens of the prompt, cached ones included.
    pub prompt_tokens: u32,
    /// Tokens generated.
    pub completion_tokens: u32,
    /// Prompt tokens whose KV was in the cache.
    pub cached_tokens: u32,
    /// Generated tokens that were thoughts.
    pub reasoning_tokens: u32,
}

/// The end of all choices.
#[derive(Clone, Debug, PartialEq)]
pub struct GenerateEnd {
    /// Of each choice, in order.
    pub choices: Vec<ChoiceEnd>,
    /// What was used.
    pub usage: Usage,
    /// The engine's own account.
    pub receipt: Option<Receipt>,
}

/// One event of an answer. The last two end it.
#[derive(Clone, Debug, PartialEq)]
pub enum GenerateEvent {
    /// New text.
    Delta(TextDelta),
    /// New thoughts.
    Reasoning(ReasoningDelta),
    /// A part of a tool call.
    Call(CallDelta),
    /// The engine ended it.
    Finished(GenerateEnd),
    /// It failed.
    Failed(KvistError),
}

impl GenerateEvent {
    /// Whether nothing follows.
    #[must_use]
    pub fn is_terminal(&self) -> bool {
        matches!(self, Self::Finished(_) | Self::Failed(_))
    }
}

/// The events of one request: each item is everything that was at hand. Dropping it ends the request at the worker and
/// its reservation.
pub struct EventStream {
    /// The router's id of the request.
    pub request_id: Arc<str>,
    /// Tokens of the prompt.
    pub prompt_tokens: u32,
    batches: Pin<Box<dyn Stream<Item = Vec<GenerateEvent>> + Send>>,
}

impl std::fmt::Debug for EventStream {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("EventStream").field("request_id", &self.request_id).finish_non_exhaustive()
    }
}

impl EventStream {
    /// A stream of batches, the last of which ends with a terminal event.
    pub fn new(
        request_id: Arc<str>,
        prompt_tokens: u32,
        batches: impl Stream<Item = Vec<GenerateEvent>> + Send + 'static,
    ) -> Self {
        Self { request_id, prompt_tokens, batches: Box::pin(batches) }
    }
}

impl Stream for EventStream {
    type Item = Vec<GenerateEvent>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.batches.as_mut().poll_next(context)
    }
}

/// Inputs to embed, whatever door they came by.
#[derive(Clone, Debug)]
pub struct EmbedInput {
    /// Name of the model.
    pub model: String,
    /// One for each embedding.
    pub inputs: Vec<Prompt>,
}

/// Their embeddings.
#[derive(Clone, Debug, PartialEq)]
pub struct EmbedOutput {
    /// The router's id of the request.
    pub request_id: Arc<str>,
    /// In order of the inputs.
    pub embeddings: Vec<Embedding>,
}

/// The tokens of a prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tokens {
    /// In order.
    pub ids: Vec<u32>,
    /// Longest context of the model, in tokens; 0 while no worker takes requests.
    pub context_tokens: u32,
}

/// What answers requests: the router itself, or a remote one.
pub trait Generate: Send + Sync + 'static {
    /// Starts a request. It has been placed on a target when this returns, or waits for a place as the stream's first event
    /// will tell; an error means that nothing runs or waits.
    fn generate(&self, context: RequestContext, input: GenerateInput)
    -> BoxFuture<'_, Result<EventStream, KvistError>>;

    /// Embeds inputs. Dropping the future ends what runs for it.
    fn embed(&self, context: RequestContext, input: EmbedInput) -> BoxFuture<'_, Result<EmbedOutput, KvistError>>;

    /// The text of token ids.
    fn detokenize<'a>(&'a self, model: &'a str, token_ids: &'a [u32]) -> BoxFuture<'a, Result<String, KvistError>>;

    /// The tokens of a prompt, as they would go to an engine.
    fn tokenize<'a>(&'a self, model: &'a str, prompt: Prompt) -> BoxFuture<'a, Result<Tokens, KvistError>>;

    /// The models, by name.
    fn models(&self) -> BoxFuture<'_, Result<Vec<ModelSummary>, KvistError>>;
}
