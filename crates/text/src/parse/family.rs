//! Which parsers there are, and which one a model needs.

use std::sync::Arc;

use super::{
    call::KnownTools,
    harmony,
    marked::{MarkedCalls, MarkedForm},
    pythonic::{self, PythonCalls},
    reasoning::ThoughtForm,
    sections::{Head, SectionCalls, SectionForm},
    tagged::{TaggedCalls, TaggedForm},
    tool::OfferedTool,
};

/// How a family of models writes tool calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ToolFamily {
    /// Hermes, Qwen 2.5 and 3: `<tool_call>{…}</tool_call>`.
    Hermes,
    /// Llama 3: the answer is `{"name": …, "parameters": …}`.
    Llama3Json,
    /// Mistral: `[TOOL_CALLS]` and a list, or `NAME[ARGS]{…}`.
    Mistral,
    /// DeepSeek V3 and R1, with arguments in a code fence.
    DeepSeekV3,
    /// DeepSeek V3.1 and later.
    DeepSeekV31,
    /// The channels of gpt-oss.
    GptOss,
    /// Kimi K2. Experimental.
    KimiK2,
    /// Granite 3. Experimental.
    Granite,
    /// Qwen3-Coder: `<function=NAME><parameter=KEY>`. Experimental.
    Qwen3Coder,
    /// GLM 4.5: `NAME<arg_key>KEY</arg_key>`. Experimental.
    Glm,
    /// Llama 4 and Olmo: `[NAME(KEY=VALUE)]`, as Python writes calls. Experimental.
    Pythonic,
}

/// How a call is written around its name, which is JSON, and its arguments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct JsonCallForm {
    /// What nothing but a call begins with.
    pub mark: &'static str,
    /// From the mark on.
    pub before_name: &'static str,
    /// Between name and arguments.
    pub before_arguments: &'static str,
    /// Up to the end of the call.
    pub behind_arguments: &'static str,
}

/// How a family of models marks its thoughts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReasoningFamily {
    /// `<think>…</think>`, as in Qwen 3: without marks there are no thoughts.
    Qwen3,
    /// The same, where thoughts come first in any case.
    DeepSeekR1,
    /// Magistral: `[THINK]…[/THINK]`.
    Mistral,
    /// The channels of gpt-oss.
    GptOss,
    /// Kimi: `◁think▷…◁/think▷`. Experimental.
    Kimi,
    /// Seed-OSS: `<seed:think>…</seed:think>`. Experimental.
    SeedOss,
}

const HERMES: MarkedForm = MarkedForm {
    open: "<tool_call>",
    close: "</tool_call>",
    begins_with_calls: false,
    between: &[],
    has_bare_names: false,
};
const LLAMA: MarkedForm = MarkedForm {
    open: "<|python_tag|>",
    close: "",
    begins_with_calls: true,
    between: &[';', ','],
    has_bare_names: false,
};
const MISTRAL: MarkedForm =
    MarkedForm { open: "[TOOL_CALLS]", close: "", begins_with_calls: false, between: &[], has_bare_names: true };
const GRANITE: MarkedForm =
    MarkedForm { open: "<|tool_call|>", close: "", begins_with_calls: false, between: &[], has_bare_names: false };
/// A schema makes the answer a call or a list of calls.
const CONSTRAINED: MarkedForm =
    MarkedForm { open: "", close: "", begins_with_calls: true, between: &[], has_bare_names: false };

const DEEPSEEK_V3: SectionForm = SectionForm {
    section_open: "<｜tool▁calls▁begin｜>",
    section_close: "<｜tool▁calls▁end｜>",
    call_open: "<｜tool▁call▁begin｜>",
    separator: "<｜tool▁sep｜>",
    call_close: "<｜tool▁call▁end｜>",
    head: Head::Kind,
};
const DEEPSEEK_V31: SectionForm = SectionForm { head: Head::Name, ..DEEPSEEK_V3 };
const KIMI_K2: SectionForm = SectionForm {
    section_open: "<|tool_calls_section_begin|>",
    section_close: "<|tool_calls_section_end|>",
    call_open: "<|tool_call_begin|>",
    separator: "<|tool_call_argument_begin|>",
    call_close: "<|tool_call_end|>",
    head: Head::Numbered,
};

/// How the ids of calls look that a model's template accepts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallIdForm {
    /// `call_` and letters.
    Prefixed,
    /// Nine letters or digits: what Mistral's templates insist on.
    NineCharacters,
    /// `functions.NAME:NUMBER`, which Kimi's template repeats.
    Numbered,
}

impl ToolFamily {
    /// All, by name.
    pub const ALL: [(&'static str, Self); 11] = [
        ("hermes", Self::Hermes),
        ("llama3_json", Self::Llama3Json),
        ("mistral", Self::Mistral),
        ("deepseek_v3", Self::DeepSeekV3),
        ("deepseek_v31", Self::DeepSeekV31),
        ("gpt_oss", Self::GptOss),
        ("kimi_k2", Self::KimiK2),
        ("granite", Self::Granite),
        ("qwen3_coder", Self::Qwen3Coder),
        ("glm", Self::Glm),
        ("pythonic", Self::Pythonic),
    ];

    /// The family of a name.
    #[must_use]
    pub fn of_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|(other, _)| *other == name).map(|(_, family)| family)
    }

    /// The name.
    #[must_use]
    pub fn name(self) -> &'static str {
        Self::ALL.into_iter().find(|(_, family)| *family == self).map_or("", |(name, _)| name)
    }

    /// The family whose calls a chat template writes, where it writes any.
    #[must_use]
    pub fn of_template(template: &str) -> Option<Self> {
        let has = |text: &str| template.contains(text);
        if has("<|channel|>") && has("<|message|>") {
            Some(Self::GptOss)
        } else if has(DEEPSEEK_V3.call_open) {
            // V3 writes arguments in a fence, V3.1 as they are.
            Some(if has("```json") { Self::DeepSeekV3 } else { Self::DeepSeekV31 })
        } else if has(KIMI_K2.call_open) {
            Some(Self::KimiK2)
        } else if has(MISTRAL.open) {
            Some(Self::Mistral)
        } else if has(HERMES.open) {
            Some(match (has("<function="), has("<arg_key>")) {
                (true, _) => Self::Qwen3Coder,
                (_, true) => Self::Glm,
                _ => Self::Hermes,
            })
        } else if has(GRANITE.open) {
            Some(Self::Granite)
        } else if has(pythonic::OPEN) || has("func_name1(params_name1=") {
            // Llama 4 shows the form to its model in the system's message.
            Some(Self::Pythonic)
        } else if has("<|start_header_id|>") && has("\"parameters\"") {
            Some(Self::Llama3Json)
        } else {
            None
        }
    }

    /// Control tokens that have to reach the parser as text.
    #[must_use]
    pub fn marks(self) -> Vec<&'static str> {
        let sections = |form: SectionForm| {
            vec![form.section_open, form.section_close, form.call_open, form.separator, form.call_close]
        };
        match self {
            Self::Hermes | Self::Qwen3Coder => vec![HERMES.open, HERMES.close],
            Self::Glm => {
                vec![HERMES.open, HERMES.close, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"]
            }
            Self::Llama3Json => vec![LLAMA.open],
            Self::Mistral => vec![MISTRAL.open, "[ARGS]", "[CALL_ID]"],
            Self::DeepSeekV3 | Self::DeepSeekV31 => sections(DEEPSEEK_V3),
            Self::GptOss => harmony::MARKS.to_vec(),
            Self::KimiK2 => sections(KIMI_K2),
            Self::Granite => vec![GRANITE.open],
            Self::Pythonic => vec![pythonic::OPEN, pythonic::CLOSE],
        }
    }

    /// How ids of calls look that the family's templates accept.
    #[must_use]
    pub fn call_id_form(self) -> CallIdForm {
        match self {
            Self::Mistral => CallIdForm::NineCharacters,
            Self::KimiK2 => CallIdForm::Numbered,
            _ => CallIdForm::Prefixed,
        }
    }

    /// How the family writes one call, for engines that are to keep to it; none where a call has no mark of plain text.
    #[must_use]
    pub fn json_form(self) -> Option<JsonCallForm> {
        (self == Self::Hermes).then_some(JsonCallForm {
            mark: HERMES.open,
            before_name: "<tool_call>\n{\"name\": ",
            before_arguments: ", \"arguments\": ",
            behind_arguments: "}\n</tool_call>",
        })
    }

    pub(crate) fn reader(self, tools: &Arc<[OfferedTool]>) -> Option<ToolReader> {
        let marked =
            |form, known: KnownTools| ToolReader::Marked(super::marks::Fed::new(MarkedCalls::new(form, known)));
        let sections = |form| ToolReader::Sections(super::marks::Fed::new(SectionCalls::new(form)));
        let tagged = |form| ToolReader::Tagged(super::marks::Fed::new(TaggedCalls::new(form, Arc::clone(tools))));
        Some(match self {
            Self::Hermes => marked(HERMES, None),
            // Without a mark, only the name tells a call from an answer in JSON.
            Self::Llama3Json => marked(LLAMA, Some(Arc::clone(tools))),
            Self::Mistral => marked(MISTRAL, None),
            Self::Granite => marked(GRANITE, None),
            Self::DeepSeekV3 => sections(DEEPSEEK_V3),
            Self::DeepSeekV31 => sections(DEEPSEEK_V31),
            Self::KimiK2 => sections(KIMI_K2),
            Self::Qwen3Coder => tagged(TaggedForm::Qwen3Coder),
            Self::Glm => tagged(TaggedForm::Glm),
            Self::Pythonic => ToolReader::Pythonic(super::marks::Fed::new(PythonCalls::new(Arc::clone(tools)))),
            Self::GptOss => return None,
        })
    }
}

impl ReasoningFamily {
    /// All, by name.
    pub const ALL: [(&'static str, Self); 6] = [
        ("qwen3", Self::Qwen3),
        ("deepseek_r1", Self::DeepSeekR1),
        ("mistral", Self::Mistral),
        ("gpt_oss", Self::GptOss),
        ("kimi", Self::Kimi),
        ("seed_oss", Self::SeedOss),
    ];

    /// The family of a name.
    #[must_use]
    pub fn of_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|(other, _)| *other == name).map(|(_, family)| family)
    }

    /// The name.
    #[must_use]
    pub fn name(self) -> &'static str {
        Self::ALL.into_iter().find(|(_, family)| *family == self).map_or("", |(name, _)| name)
    }

    /// The family whose thoughts a chat template knows, where it knows any.
    #[must_use]
    pub fn of_template(template: &str) -> Option<Self> {
        let has = |text: &str| template.contains(text);
        let of_form = |family: Self| family.form().is_some_and(|form| has(form.close));
        if has("<|channel|>") && has("<|message|>") {
            Some(Self::GptOss)
        } else if of_form(Self::Mistral) {
            Some(Self::Mistral)
        } else if of_form(Self::Kimi) {
            Some(Self::Kimi)
        } else if of_form(Self::SeedOss) {
            Some(Self::SeedOss)
        } else if of_form(Self::Qwen3) {
            // A template that cuts thoughts of the past says nothing of whether there always are some: that of DeepSeek R1
            // opens them in the prompt, which is seen there.
            Some(Self::Qwen3)
        } else {
            None
        }
    }

    /// The marks; none where channels take their place.
    #[must_use]
    pub(crate) fn form(self) -> Option<ThoughtForm> {
        let form = |open, close| Some(ThoughtForm { open, close, begins_with_thoughts: false });
        match self {
            Self::Qwen3 => form("<think>", "</think>"),
            Self::DeepSeekR1 => Some(ThoughtForm { open: "<think>", close: "</think>", begins_with_thoughts: true }),
            Self::Mistral => form("[THINK]", "[/THINK]"),
            Self::Kimi => form("◁think▷", "◁/think▷"),
            Self::SeedOss => form("<seed:think>", "</seed:think>"),
            Self::GptOss => None,
        }
    }

    /// Control tokens that have to reach the parser as text.
    #[must_use]
    pub fn marks(self) -> Vec<&'static str> {
        self.form().map_or_else(|| harmony::MARKS.to_vec(), |form| vec![form.open, form.close])
    }
}

/// What reads calls out of the answer.
#[derive(Debug)]
pub(crate) enum ToolReader {
    Marked(super::marks::Fed<MarkedCalls>),
    Sections(super::marks::Fed<SectionCalls>),
    Tagged(super::marks::Fed<TaggedCalls>),
    Pythonic(super::marks::Fed<PythonCalls>),
    /// The whole answer is the arguments of one tool.
    Named(super::marks::Fed<super::named::NamedArguments>),
}

impl ToolReader {
    /// For an answer that a schema makes a list of calls.
    pub(crate) fn constrained() -> Self {
        Self::Marked(super::marks::Fed::new(MarkedCalls::new(CONSTRAINED, None)))
    }

    /// For an answer that a schema makes the arguments of a tool.
    pub(crate) fn named(name: String) -> Self {
        Self::Named(super::marks::Fed::new(super::named::NamedArguments::new(name)))
    }

    pub(crate) fn feed(&mut self, text: &str, out: &mut super::Pieces) {
        match self {
            Self::Marked(reader) => reader.feed(text, out),
            Self::Sections(reader) => reader.feed(text, out),
            Self::Tagged(reader) => reader.feed(text, out),
            Self::Pythonic(reader) => reader.feed(text, out),
            Self::Named(reader) => reader.feed(text, out),
        }
    }

    pub(crate) fn finish(&mut self, out: &mut super::Pieces) {
        match self {
            Self::Marked(reader) => reader.finish(out),
            Self::Sections(reader) => reader.finish(out),
            Self::Tagged(reader) => reader.finish(out),
            Self::Pythonic(reader) => reader.finish(out),
            Self::Named(reader) => reader.finish(out),
        }
    }
}
