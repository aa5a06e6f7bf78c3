//! The answer of the engine: as many tokens as were asked for, one each step.

use std::{
    convert::Infallible,
    pin::Pin,
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::Bytes;
use http_body::{Body, Frame};
use serde::Deserialize;
use tokio::time::{Instant, Sleep};

/// What a request says, as far as an engine that computes nothing needs it.
#[derive(Deserialize)]
pub struct Asked {
    messages: Vec<Message>,
    max_tokens: u32,
    #[serde(default)]
    pub stream: bool,
}

#[derive(Deserialize)]
struct Message {
    content: String,
}

/// The events of one answer.
pub struct Tokens {
    /// The event of a token; the same each time, so that it costs a count of references.
    token: Bytes,
    start: Option<Bytes>,
    end: Option<Bytes>,
    left: u32,
    step: Duration,
    /// None where a step takes no time: a timer fires a millisecond later at the earliest.
    timer: Option<Pin<Box<Sleep>>>,
}

impl Tokens {
    /// The first token comes a step after the request, as after a prefill that takes no time.
    pub fn new(model: &str, asked: &Asked, step: Duration) -> Self {
        let prompt: usize = asked.messages.iter().map(|message| message.content.split_ascii_whitespace().count()).sum();
        let completion = asked.max_tokens;
        let head = format!(
            "data: {{\"id\":\"chatcmpl-bench\",\"object\":\"chat.completion.chunk\",\"created\":1,\"model\":\"{model}\",\"choices\":["
        );
        let chunk = |delta: &str, finish: &str| {
            format!(
                "{head}{{\"index\":0,\"delta\":{{{delta}}},\"logprobs\":null,\"finish_reason\":{finish}}}],\"usage\":null}}\n\n"
            )
        };
        let usage = format!(
            "{head}],\"usage\":{{\"prompt_tokens\":{prompt},\"completion_tokens\":{completion},\"total_tokens\":{}}}}}\n\n",
            prompt + completion as usize
        );
        Self {
            token: Bytes::from(chunk("\"content\":\" to\"", "null")),
            start: Some(Bytes::from(chunk("\"role\":\"assistant\",\"content\":\"\"", "null"))),
            end: Some(Bytes::from(format!("{}{usage}data: [DONE]\n\n", chunk("", "\"length\"")))),
            left: completion,
            step,
            timer: (!step.is_zero()).then(|| Box::pin(tokio::time::sleep(step))),
        }
    }
}

impl Body for Tokens {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Self::Data>, Self::Error>>> {
        if self.left == 0 {
            return Poll::Ready(self.end.take().map(|end| Ok(Frame::data(end))));
        }
        if let Some(timer) = &mut self.timer {
            ready!(timer.as_mut().poll(context));
        }
        if let Some(start) = self.start.take() {
            return Poll::Ready(Some(Ok(Frame::data(start))));
        }
        self.left -= 1;
        let step = self.step;
        if let Some(timer) = &mut self.timer {
            timer.as_mut().reset(Instant::now() + step);
        }
        Poll::Ready(Some(Ok(Frame::data(self.token.clone()))))
    }

    fn is_end_stream(&self) -> bool {
        self.left == 0 && self.end.is_none()
    }
}
