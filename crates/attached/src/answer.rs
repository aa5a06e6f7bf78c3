//! A server's answer as events of an engine. Pure.
//!
//! It ends well only where the server has given every choice a reason and then its end mark.

use kvist_errors::{Code, KvistError};
use kvist_proto::{
    engine::v1::{FinishReason, TokenDelta, TokenLogprobs, TopLogprob},
    events::v1::Receipt,
};
use serde_json::Value;

use crate::failure::failure_in_stream;

/// Most bytes of an event.
const LONGEST_EVENT: usize = 16 * 1024 * 1024;

/// What is known of a request's answer so far.
#[derive(Debug)]
pub(crate) struct Answer {
    held: Vec<u8>,
    prompt_tokens: u32,
    /// Alternatives for each token; none where nobody asked for log-probabilities.
    alternatives: Option<u32>,
    reasons: Vec<Option<FinishReason>>,
    stop_token_id: Option<u32>,
    completion_tokens: u32,
    cached_tokens: Option<u32>,
    has_ended: bool,
}

/// How a request ended.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Ending {
    pub(crate) reason: FinishReason,
    pub(crate) choice_reasons: Vec<FinishReason>,
    pub(crate) stop_token_id: Option<u32>,
}

impl Answer {
    pub(crate) fn new(prompt_tokens: u32, choices: u32, alternatives: Option<u32>) -> Self {
        Self {
            held: Vec::new(),
            prompt_tokens,
            alternatives,
            reasons: vec![None; choices.max(1) as usize],
            stop_token_id: None,
            completion_tokens: 0,
            cached_tokens: None,
            has_ended: false,
        }
    }

    /// Takes bytes of the stream and returns the tokens in them.
    ///
    /// # Errors
    /// The server failed, or says what cannot be understood.
    pub(crate) fn take(&mut self, piece: &[u8]) -> Result<Vec<TokenDelta>, KvistError> {
        self.held.extend_from_slice(piece);
        let Some(last) = self.held.iter().rposition(|byte| *byte == b'\n') else {
            if self.held.len() > LONGEST_EVENT {
                return Err(not_understood("an event without an end"));
            }
            return Ok(Vec::new());
        };
        let rest = self.held.split_off(last + 1);
        let lines = std::mem::replace(&mut self.held, rest);
        let mut deltas = Vec::new();
        for line in lines.split(|byte| *byte == b'\n') {
            let Some(data) = line.strip_prefix(b"data:") else { continue };
            let data = data.trim_ascii();
            if data == b"[DONE]" {
                self.has_ended = true;
            } else if !self.has_ended {
                let event = serde_json::from_slice(data).map_err(|_| not_understood("an event that is not JSON"))?;
                self.event(&event, &mut deltas)?;
            }
        }
        Ok(deltas)
    }

    /// Whether the end mark was read.
    pub(crate) fn has_ended(&self) -> bool {
        self.has_ended
    }

    /// How it ended, once nothing more comes.
    ///
    /// # Errors
    /// It has not ended as answers end.
    pub(crate) fn ending(&self) -> Result<Ending, KvistError> {
        if !self.has_ended {
            return Err(crate::client::lost());
        }
        let reasons: Option<Vec<FinishReason>> = self.reasons.iter().copied().collect();
        match reasons.as_deref() {
            Some([reason, others @ ..]) => {
                Ok(Ending { reason: *reason, choice_reasons: others.to_vec(), stop_token_id: self.stop_token_id })
            }
            _ => Err(not_understood("an answer without a reason for its end")),
        }
    }

    /// The account of the request, as far as the server gives one.
    pub(crate) fn receipt(&self) -> Receipt {
        Receipt {
            prompt_tokens: self.prompt_tokens,
            cached_tokens: self.cached_tokens.unwrap_or(0),
            completion_tokens: self.completion_tokens,
            ..Receipt::default()
        }
    }

    fn event(&mut self, event: &Value, deltas: &mut Vec<TokenDelta>) -> Result<(), KvistError> {
        if event.get("error").is_some_and(|error| !error.is_null()) {
            return Err(failure_in_stream(event));
        }
        let cached = event.pointer("/usage/prompt_tokens_details/cached_tokens").and_then(Value::as_u64);
        if let Some(cached) = cached {
            self.cached_tokens = Some(u32::try_from(cached).unwrap_or(u32::MAX).min(self.prompt_tokens));
        }
        let choices = event.get("choices").and_then(Value::as_array);
        for choice in choices.into_iter().flatten() {
            self.choice(choice, deltas)?;
        }
        Ok(())
    }

    fn choice(&mut self, choice: &Value, deltas: &mut Vec<TokenDelta>) -> Result<(), KvistError> {
        let index = choice.get("index").and_then(Value::as_u64).and_then(|index| u32::try_from(index).ok());
        let index = index.ok_or_else(|| not_understood("a choice without a number"))?;
        let mut token_ids = match choice.get("token_ids") {
            None | Some(Value::Null) => Vec::new(),
            Some(ids) => token_ids(ids).ok_or_else(|| not_understood("token ids that are none"))?,
        };
        if token_ids.is_empty() && choice.get("text").and_then(Value::as_str).is_some_and(|text| !text.is_empty()) {
            return Err(not_understood("text without its token ids"));
        }
        let Some(ended) = self.reasons.get_mut(index as usize) else {
            return Err(not_understood("a choice that nobody asked for"));
        };
        if ended.is_some() {
            return Err(not_understood("more of a choice that has ended"));
        }
        self.completion_tokens += u32::try_from(token_ids.len()).unwrap_or(u32::MAX);
        if let Some(reason) = choice.get("finish_reason").and_then(Value::as_str) {
            let reason = finish_reason(reason)?;
            *ended = Some(reason);
            // Texts are not matched there, so only a token can have ended it: the last one.
            if reason == FinishReason::Stop
                && let Some(token) = token_ids.pop()
                && index == 0
            {
                self.stop_token_id = Some(token);
            }
        }
        if token_ids.is_empty() {
            return Ok(());
        }
        let logprobs = match self.alternatives {
            None => Vec::new(),
            Some(alternatives) => {
                let content = choice.pointer("/logprobs/content").and_then(Value::as_array);
                let content = content.ok_or_else(|| not_understood("tokens without their log-probabilities"))?;
                content.iter().take(token_ids.len()).map(|one| token_logprobs(one, alternatives)).collect()
            }
        };
        deltas.push(TokenDelta { index, token_ids, logprobs, cached_tokens: None });
        Ok(())
    }
}

fn not_understood(what: &str) -> KvistError {
    KvistError::new(Code::EngineFailed, format!("the server sent {what}"))
}

fn token_ids(value: &Value) -> Option<Vec<u32>> {
    value.as_array()?.iter().map(|id| id.as_u64().and_then(|id| u32::try_from(id).ok())).collect()
}

fn finish_reason(reason: &str) -> Result<FinishReason, KvistError> {
    match reason {
        // vLLM calls it a repetition when it found a pattern, as it was configured to.
        "stop" | "repetition" => Ok(FinishReason::Stop),
        "length" => Ok(FinishReason::Length),
        "abort" => Ok(FinishReason::Aborted),
        "error" => Err(KvistError::new(Code::EngineFailed, "the engine gave the request up")),
        _ => Err(not_understood("a reason that is not known")),
    }
}

/// One position. The chosen token is among the alternatives there even when it is none of the best.
fn token_logprobs(position: &Value, alternatives: u32) -> TokenLogprobs {
    let logprob = |value: &Value| value.get("logprob").and_then(Value::as_f64).map_or(f32::NAN, |one| one as f32);
    let top = position.get("top_logprobs").and_then(Value::as_array);
    let mut top: Vec<(u64, TopLogprob)> = top
        .into_iter()
        .flatten()
        .filter_map(|one| {
            let rank = one.get("rank")?.as_u64().filter(|rank| *rank <= alternatives.into())?;
            let token_id = u32::try_from(one.get("token_id")?.as_u64()?).ok()?;
            Some((rank, TopLogprob { token_id, logprob: logprob(one) }))
        })
        .collect();
    top.sort_by_key(|(rank, _)| *rank);
    TokenLogprobs { logprob: logprob(position), top: top.into_iter().map(|(_, one)| one).collect() }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const STREAM: &str = concat!(
        "data: {\"choices\":[{\"index\":0,\"token_ids\":[5,6],\"finish_reason\":null}]}\n\n",
        ": a comment\r\n\r\n",
        "data: {\"choices\":[{\"index\":1,\"token_ids\":[7],\"finish_reason\":\"length\"}]}\n\n",
        "data: {\"choices\":[{\"index\":0,\"token_ids\":[8,2],\"finish_reason\":\"stop\",\"stop_reason\":null}]}\n\n",
        "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":9,\"completion_tokens\":5,\"prompt_tokens_details\":{\"cached_tokens\":4}}}\n\n",
        "data: [DONE]\n\n",
    );

    fn one(text: &str) -> Result<Vec<TokenDelta>, KvistError> {
        Answer::new(9, 1, None).take(format!("data: {text}\n\n").as_bytes())
    }

    proptest! {
        #[test]
        fn however_it_is_cut_it_says_the_same(mut cuts in prop::collection::vec(0..STREAM.len(), 0..8)) {
            cuts.sort_unstable();
            let mut answer = Answer::new(9, 2, None);
            let (mut tokens, mut start) = ([Vec::new(), Vec::new()], 0);
            for cut in cuts.into_iter().chain([STREAM.len()]) {
                for delta in answer.take(&STREAM.as_bytes()[start..cut]).unwrap() {
                    tokens[delta.index as usize].extend(delta.token_ids);
                }
                start = cut;
            }
            prop_assert_eq!([vec![5, 6, 8], vec![7]], tokens);
            let expected = Ending {
                reason: FinishReason::Stop,
                choice_reasons: vec![FinishReason::Length],
                stop_token_id: Some(2),
            };
            prop_assert_eq!(expected, answer.ending().unwrap());
            let receipt = answer.receipt();
            prop_assert_eq!((9, 5, 4), (receipt.prompt_tokens, receipt.completion_tokens, receipt.cached_tokens));
        }

        #[test]
        fn one_that_breaks_off_has_no_ending(kept in 0..STREAM.len()) {
            let mut answer = Answer::new(9, 2, None);
            let _ = answer.take(&STREAM.as_bytes()[..kept]).unwrap();
            let is_whole = kept > STREAM.rfind("[DONE]").unwrap() + "[DONE]".len();
            prop_assert_eq!(is_whole, answer.ending().is_ok());
        }

        #[test]
        fn garbage_is_an_error_or_nothing(garbage in prop::collection::vec(any::<u8>(), 0..200)) {
            let mut answer = Answer::new(9, 1, None);
            if let Ok(deltas) = answer.take(&garbage) {
                prop_assert!(deltas.is_empty());
                prop_assert!(answer.ending().is_err());
            }
        }
    }

    #[test]
    fn what_cannot_be_trusted_is_an_error() {
        for text in [
            "{",
            r#"{"choices":[{"token_ids":[1]}]}"#,
            r#"{"choices":[{"index":0,"token_ids":[-1]}]}"#,
            r#"{"choices":[{"index":0,"token_ids":"1"}]}"#,
            r#"{"choices":[{"index":1,"token_ids":[1]}]}"#,
            r#"{"choices":[{"index":0,"text":"a"}]}"#,
            r#"{"choices":[{"index":0,"finish_reason":"tired"}]}"#,
            r#"{"choices":[{"index":0,"finish_reason":"error"}]}"#,
            r#"{"choices":[{"index":0,"finish_reason":"stop"},{"index":0,"token_ids":[1]}]}"#,
            r#"{"error":{"message":"m","code":500}}"#,
        ] {
            assert_eq!(Code::EngineFailed, one(text).unwrap_err().code, "{text}");
        }
        let refused = one(r#"{"error":{"message":"no such thing","code":400}}"#).unwrap_err();
        assert_eq!((Code::InvalidArgument, "no such thing"), (refused.code, refused.message.as_str()));
        let mut answer = Answer::new(9, 1, None);
        answer.take(b"data: [DONE]\n\n").unwrap();
        assert_eq!(Code::EngineFailed, answer.ending().unwrap_err().code);
    }

    #[test]
    fn log_probabilities_are_the_best_in_order() {
        let text = concat!(
            r#"data: {"choices":[{"index":0,"token_ids":[5],"logprobs":{"content":[{"token_id":5,"logprob":-3.0,"rank":9,"#,
            r#""top_logprobs":[{"token_id":5,"logprob":-3.0,"rank":9},{"token_id":8,"logprob":-1.0,"rank":2},"#,
            r#"{"token_id":7,"logprob":-0.5,"rank":1}]}]}}]}"#,
            "\n",
        );
        let deltas = Answer::new(9, 1, Some(2)).take(text.as_bytes()).unwrap();
        let top = |token_id, logprob| TopLogprob { token_id, logprob };
        let expected = TokenLogprobs { logprob: -3.0, top: vec![top(7, -0.5), top(8, -1.0)] };
        assert_eq!(vec![expected], deltas[0].logprobs);
        let missing = Answer::new(9, 1, Some(2)).take(b"data: {\"choices\":[{\"index\":0,\"token_ids\":[5]}]}\n");
        assert!(missing.is_err());
    }
}
