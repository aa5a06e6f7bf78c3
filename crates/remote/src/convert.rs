//! The router's values to messages of `kvist.router.v1`, and its events from them.

use kvist_errors::{Code, KvistError};
use kvist_proto::{
    engine::v1::{FinishReason, TokenIds, TokenLogprobs},
    router::v1 as wire,
};
use kvist_router::{
    AnswerForm, CallDelta, CallHead, ChoiceEnd, GenerateEnd, GenerateEvent, GenerateInput, Prompt, ReasoningDelta,
    RequestContext, TextDelta, TokenLogprob, ToolChoice, Usage, join_salts,
};
use serde_json::Value;

pub(crate) fn write_prompt(prompt: Prompt) -> wire::Prompt {
    use wire::prompt::Form;
    let form = match prompt {
        Prompt::Text(text) => Form::Text(text),
        Prompt::Tokens(ids) => Form::Tokens(TokenIds { ids }),
        Prompt::Chat(chat) => Form::ChatJson(wire::ChatJson {
            messages: Value::Array(chat.messages).to_string(),
            tools: Value::Array(chat.tools).to_string(),
            template_variables: Value::Object(chat.variables).to_string(),
            without_generation_prompt: !chat.add_generation_prompt,
        }),
    };
    wire::Prompt { form: Some(form) }
}

/// A request as a router takes it. Its caches are separated by the caller's salt too, which a router joins in the same
/// way: behind both doors the same caller finds the same blocks.
pub(crate) fn write_request(context: &RequestContext, input: GenerateInput) -> wire::GenerateRequest {
    wire::GenerateRequest {
        model: input.model,
        prompt: Some(write_prompt(input.prompt)),
        sampling: Some(input.sampling),
        stop: Some(input.stop),
        stop_strings: input.stop_strings,
        include_stop_string: input.include_stop_string,
        structured_output: input.structured_output,
        adapter: input.adapter,
        cache_salt: join_salts(&context.caller_salt, &input.cache_salt),
        priority: input.priority,
        session_id: context.session_id.clone(),
        request_id: context.request_id.clone(),
        engine_extras: input.engine_extras,
        return_token_ids: input.return_token_ids,
        class: context.class.clone(),
        answer_form: Some(write_form(input.form)),
    }
}

fn write_form(form: AnswerForm) -> wire::AnswerForm {
    use wire::tool_choice::Choice;
    let choice = match form.tool_choice {
        ToolChoice::None => None,
        ToolChoice::Auto => Some(Choice::Mode(wire::ToolMode::Auto.into())),
        ToolChoice::Required => Some(Choice::Mode(wire::ToolMode::Required.into())),
        ToolChoice::Named(name) => Some(Choice::Name(name)),
    };
    wire::AnswerForm {
        separate_reasoning: form.separate_reasoning,
        tool_choice: choice.map(|choice| wire::ToolChoice { choice: Some(choice) }),
        single_call: form.single_call,
        strict_tools: form.strict_tools,
    }
}

/// One event of an answer.
///
/// # Errors
/// The router says something that this version does not know.
pub(crate) fn read_event(response: wire::GenerateResponse) -> Result<GenerateEvent, KvistError> {
    use wire::generate_response::Event;
    let unknown = || KvistError::new(Code::Internal, "the router sent an event that this edge does not know");
    Ok(match response.event.ok_or_else(unknown)? {
        Event::Delta(delta) => GenerateEvent::Delta(read_delta(delta)),
        Event::Reasoning(wire::ReasoningDelta { index, text }) => {
            GenerateEvent::Reasoning(ReasoningDelta { index, text })
        }
        Event::Call(delta) => {
            let wire::CallDelta { index, call, id, name, arguments, is_end } = delta;
            // Only the first part of a call has an id.
            let head = (!id.is_empty()).then_some(CallHead { id, name });
            GenerateEvent::Call(CallDelta { index, call, head, arguments, is_end })
        }
        Event::Finished(end) => GenerateEvent::Finished(read_end(end)),
    })
}

fn read_delta(delta: wire::TextDelta) -> TextDelta {
    let wire::TextDelta { index, text, token_ids, logprobs, logprob_tokens } = delta;
    let logprobs = logprobs.into_iter().zip(logprob_tokens).map(read_logprob).collect();
    TextDelta { index, text, token_ids, logprobs }
}

fn read_logprob((logprobs, named): (TokenLogprobs, wire::NamedToken)) -> TokenLogprob {
    let top = logprobs.top.into_iter().zip(named.top_texts);
    TokenLogprob {
        token_id: named.token_id,
        bytes: named.text.into(),
        logprob: logprobs.logprob,
        top: top.map(|(top, text)| (top.token_id, text.into(), top.logprob)).collect(),
    }
}

fn read_end(end: wire::GenerateFinished) -> GenerateEnd {
    let choices = end.choices.into_iter().map(|choice| ChoiceEnd {
        index: choice.index,
        reason: FinishReason::try_from(choice.reason).unwrap_or(FinishReason::Unspecified),
        stop_string: choice.stop_string,
        stop_token_id: choice.stop_token_id,
        complete_calls: choice.complete_calls,
    });
    let usage = end.usage.unwrap_or_default();
    GenerateEnd {
        choices: choices.collect(),
        usage: Usage {
            prompt_tokens: usage.prompt_tokens,
            completion_tokens: usage.completion_tokens,
            cached_tokens: usage.cached_tokens,
            reasoning_tokens: usage.reasoning_tokens,
        },
        receipt: end.receipt,
    }
}
