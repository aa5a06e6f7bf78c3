//! What a request needs of an engine that not every engine has.

use kvist_proto::engine::v1::{Capabilities, StructuredOutput, structured_output::Constraint};

use crate::{generate::GenerateInput, parsing::OfferedTools};

/// The field of tools whose arguments have to keep to their schema.
const STRICT: &str = "tools.strict";

/// Features that not every engine has.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Needs {
    top_logprobs: Option<u32>,
    logprobs: bool,
    json: bool,
    /// The JSON is that of tool calls.
    calls: bool,
    structural_tag: bool,
    /// The tag is that of tools whose arguments keep to their schema.
    strict_tools: bool,
    regex: bool,
    grammar: bool,
    choice: bool,
    adapter: bool,
    pub(crate) embeddings: bool,
}

impl Needs {
    pub(crate) fn of(input: &GenerateInput) -> Self {
        let constraint =
            input.structured_output.as_ref().and_then(|StructuredOutput { constraint }| constraint.as_ref());
        Self {
            logprobs: input.sampling.top_logprobs.is_some() || input.sampling.prompt_logprobs.is_some(),
            top_logprobs: input.sampling.top_logprobs.max(input.sampling.prompt_logprobs),
            json: matches!(constraint, Some(Constraint::JsonObject(_) | Constraint::JsonSchema(_))),
            calls: false,
            structural_tag: matches!(constraint, Some(Constraint::StructuralTag(_))),
            strict_tools: false,
            regex: matches!(constraint, Some(Constraint::Regex(_))),
            grammar: matches!(constraint, Some(Constraint::Grammar(_))),
            choice: matches!(constraint, Some(Constraint::Choice(_))),
            adapter: !input.adapter.is_empty(),
            embeddings: false,
        }
    }

    /// Vectors instead of text.
    pub(crate) fn of_embeddings() -> Self {
        Self { embeddings: true, ..Self::default() }
    }

    /// The same for a request whose constraint is there for its tools.
    pub(crate) fn for_tools(self, tools: &OfferedTools) -> Self {
        Self { calls: tools.are_asked_for(), strict_tools: tools.are_strict(), ..self }
    }

    /// The field that an engine cannot honor, and why.
    pub(crate) fn missing(self, can: &Capabilities, most_top_logprobs: u32) -> Option<(&'static str, &'static str)> {
        match (self.embeddings, can.embeddings) {
            (true, false) => return Some(("model", "its engines generate text and make no embeddings")),
            (false, true) => return Some(("model", "its engines make embeddings and generate no text")),
            _ => {}
        }
        let field = self.missing_field(can, most_top_logprobs)?;
        let why = if field == STRICT {
            "the engines of this model can keep to a schema only when calls are asked for (`tool_choice` required, or one \
             tool by its name), not when the model decides"
        } else {
            "the engines of this model cannot honor it"
        };
        Some((field, why))
    }

    fn missing_field(self, can: &Capabilities, most_top_logprobs: u32) -> Option<&'static str> {
        if self.logprobs && !can.logprobs {
            Some("logprobs")
        } else if self.top_logprobs.is_some_and(|top| top > most_top_logprobs) {
            Some("top_logprobs")
        } else if self.json && !can.json_schema {
            Some(if self.calls { "tool_choice" } else { "response_format" })
        } else if self.structural_tag && !can.structural_tag {
            Some(if self.strict_tools { STRICT } else { "response_format" })
        } else if self.regex && !can.regex {
            Some("structured_output.regex")
        } else if self.grammar && !can.grammar {
            Some("structured_output.grammar")
        } else if self.choice && !(can.json_schema || can.grammar || can.regex) {
            Some("structured_output.choice")
        } else if self.adapter && !can.adapters {
            Some("adapter")
        } else {
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_missing_is_named_as_the_client_said_it() {
        let nothing = Capabilities::default();
        let json = Needs { json: true, ..Needs::default() };
        let tag = Needs { structural_tag: true, ..Needs::default() };
        for (needs, field) in [
            (json, "response_format"),
            (Needs { calls: true, ..json }, "tool_choice"),
            (tag, "response_format"),
            (Needs { strict_tools: true, ..tag }, "tools.strict"),
            (Needs { logprobs: true, ..Needs::default() }, "logprobs"),
            (Needs::of_embeddings(), "model"),
        ] {
            assert_eq!(Some(field), needs.missing(&nothing, 0).map(|(field, _)| field), "{needs:?}");
        }
        assert_eq!(None, Needs::default().missing(&nothing, 0));
        let can = Capabilities { json_schema: true, structural_tag: true, ..nothing };
        assert!(json.missing(&can, 0).is_none() && tag.missing(&can, 0).is_none());
        let embeds = Capabilities { embeddings: true, ..nothing };
        assert!(Needs::of_embeddings().missing(&embeds, 0).is_none() && Needs::default().missing(&embeds, 0).is_some());
    }
}
