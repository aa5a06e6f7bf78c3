//! One request, whatever API it came by.

use serde_json::{Map, Value};

use crate::tools::ToolChoice;

/// Which API a request came by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Endpoint {
    /// `/v1/chat/completions`.
    ChatCompletions,
    /// `/v1/completions`.
    Completions,
    /// `/v1/messages`.
    Messages,
    /// `/v1/responses`.
    Responses,
}

/// What to go on from.
#[derive(Clone, Debug, PartialEq)]
pub enum PromptForm {
    /// Messages as JSON objects, with text content.
    Chat {
        /// In order.
        messages: Vec<Value>,
        /// Tools in the form of the chat API; empty when none may be called.
        tools: Vec<Value>,
        /// Further variables of the chat template; none of those that Kvist sets itself.
        variables: Map<String, Value>,
    },
    /// Plain text.
    Text(String),
    /// Token ids.
    Tokens(Vec<u32>),
}

/// How tokens are drawn; none means the engine's default.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Sampling {
    /// 0 is greedy.
    pub temperature: Option<f32>,
    /// Range (0, 1].
    pub top_p: Option<f32>,
    /// 0 means all.
    pub top_k: Option<u32>,
    /// Range [0, 1].
    pub min_p: Option<f32>,
    /// Range -2 to 2.
    pub frequency_penalty: Option<f32>,
    /// Range -2 to 2.
    pub presence_penalty: Option<f32>,
    /// Above 0.
    pub repetition_penalty: Option<f32>,
    /// For equal answers.
    pub seed: Option<i64>,
    /// Added to logits.
    pub logit_bias: Vec<(u32, f32)>,
}

/// Constrained output.
#[derive(Clone, Debug, PartialEq)]
pub enum Structured {
    /// Any JSON object.
    JsonObject,
    /// A JSON schema, as JSON text.
    JsonSchema(String),
    /// A regular expression.
    Regex(String),
    /// A grammar in the engine's notation.
    Grammar(String),
    /// One of these texts.
    Choice(Vec<String>),
    /// A structural tag, as JSON text.
    StructuralTag(String),
}

/// Log-probabilities in the answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Logprobs {
    /// Alternatives for each token.
    pub top: u32,
}

/// One request, whatever API it came by.
#[derive(Clone, Debug, PartialEq)]
pub struct GenerateInput {
    /// Which API.
    pub endpoint: Endpoint,
    /// Name of the model.
    pub model: String,
    /// What to go on from.
    pub prompt: PromptForm,
    /// Further prompts (completions only), each with as many choices; the answer has those of all prompts, in order.
    pub further_prompts: Vec<PromptForm>,
    /// How tokens are drawn.
    pub sampling: Sampling,
    /// Most tokens to generate.
    pub max_tokens: Option<u32>,
    /// Tokens before which nothing ends the text.
    pub min_tokens: Option<u32>,
    /// Texts that end generation.
    pub stop: Vec<String>,
    /// Token ids that end generation.
    pub stop_token_ids: Vec<u32>,
    /// Whether the stop string is part of the text.
    pub include_stop_string: bool,
    /// Go on after the model's own end.
    pub ignore_eos: bool,
    /// Constrained output.
    pub structured: Option<Structured>,
    /// Which tools may be called.
    pub tool_choice: ToolChoice,
    /// Whether one answer may hold several calls.
    pub parallel_tool_calls: bool,
    /// Names of the tools whose arguments have to keep to their schema.
    pub strict_tools: Vec<String>,
    /// Whether thoughts are part of the answer.
    pub include_reasoning: bool,
    /// Log-probabilities in the answer.
    pub logprobs: Option<Logprobs>,
    /// Choices of each prompt.
    pub choices: u32,
    /// Answer as it comes.
    pub stream: bool,
    /// A last chunk with usage.
    pub include_usage: bool,
    /// Repeat the prompt before the answer (completions only).
    pub echo: bool,
    /// Separates caches.
    pub cache_salt: String,
    /// Smaller runs earlier.
    pub priority: i32,
    /// Fields that the API repeats in its answer.
    pub repeated: Map<String, Value>,
    /// Fields that Kvist does not know.
    pub extras: Map<String, Value>,
}

impl GenerateInput {
    /// A request with nothing but what every one has.
    pub(crate) fn new(endpoint: Endpoint, model: String, prompt: PromptForm) -> Self {
        Self {
            endpoint,
            model,
            prompt,
            further_prompts: Vec::new(),
            sampling: Sampling::default(),
            max_tokens: None,
            min_tokens: None,
            stop: Vec::new(),
            stop_token_ids: Vec::new(),
            include_stop_string: false,
            ignore_eos: false,
            structured: None,
            tool_choice: ToolChoice::None,
            parallel_tool_calls: true,
            strict_tools: Vec::new(),
            include_reasoning: true,
            logprobs: None,
            choices: 1,
            stream: false,
            include_usage: false,
            echo: false,
            cache_salt: String::new(),
            priority: 0,
            repeated: Map::new(),
            extras: Map::new(),
        }
    }
}
