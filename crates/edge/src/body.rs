//! Bodies of answers: whole ones, and streams of events.

use std::{
    convert::Infallible,
    pin::Pin,
    task::{Context, Poll},
    time::{Duration, Instant},
};

use bytes::{Bytes, BytesMut};
use futures::Stream as _;
use http_body::{Body, Frame, SizeHint};
use kvist_dialect::{AnswerWriter, ChoiceEnding, FinishWord, LogprobRun, UsageNumbers};
use kvist_proto::engine::v1::FinishReason;
use kvist_router::{CallDelta, ChoiceEnd, EventStream, GenerateEvent, Usage};
use kvist_upstream::RelayedBody;
use tokio::time::Sleep;

use crate::{
    answer::broke_off,
    convert::{Form, logprobs},
};

/// Bytes that an ordinary frame of events fits.
const FRAME_BYTES: usize = 512;

/// The body of an answer.
pub(crate) enum EdgeBody {
    /// Known when the answer began; none once it is out.
    Whole(Option<Bytes>),
    /// Server-sent events.
    Events(Box<EventBody>),
    /// Events of a server outside the mesh, as they come.
    Relayed(RelayedBody),
}

impl EdgeBody {
    pub(crate) fn whole(bytes: impl Into<Bytes>) -> Self {
        Self::Whole(Some(bytes.into()))
    }
}

impl Body for EdgeBody {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Self::Data>, Self::Error>>> {
        match self.get_mut() {
            Self::Whole(bytes) => {
                Poll::Ready(bytes.take().filter(|bytes| !bytes.is_empty()).map(|b| Ok(Frame::data(b))))
            }
            Self::Relayed(body) => {
                body.as_mut().poll_next(context).map(|bytes| bytes.map(|bytes| Ok(Frame::data(bytes))))
            }
            Self::Events(body) => body.poll_bytes(context).map(|bytes| bytes.map(|bytes| Ok(Frame::data(bytes)))),
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Self::Whole(bytes) => bytes.as_ref().is_none_or(Bytes::is_empty),
            Self::Events(body) => body.has_ended && body.pending.is_empty(),
            Self::Relayed(_) => false,
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Whole(bytes) => SizeHint::with_exact(bytes.as_ref().map_or(0, |bytes| bytes.len() as u64)),
            Self::Events(_) | Self::Relayed(_) => SizeHint::default(),
        }
    }
}

/// Events of a request written as they come. The connection polls it itself, without a task or channel between; when
/// the client is gone, the connection drops it, and with it the request.
pub(crate) struct EventBody {
    events: EventStream,
    writer: AnswerWriter,
    /// Characters that each choice has had; the completions API counts its tokens' places by them.
    offsets: Vec<u32>,
    /// Text before each choice's own; empty for none.
    echo: Vec<String>,
    include_reasoning: bool,
    has_started: bool,
    has_ended: bool,
    pending: BytesMut,
    keep_alive: Duration,
    wrote_at: Instant,
    timer: Pin<Box<Sleep>>,
}

impl EventBody {
    pub(crate) fn new(
        events: EventStream,
        writer: AnswerWriter,
        form: &Form,
        echo: Vec<String>,
        keep_alive: Duration,
    ) -> Self {
        let characters = |text: &String| u32::try_from(text.chars().count()).unwrap_or(u32::MAX);
        let echoed = echo.iter().map(characters).chain(std::iter::repeat(0));
        Self {
            events,
            writer,
            offsets: echoed.take(form.choices as usize).collect(),
            echo,
            include_reasoning: form.include_reasoning,
            has_started: false,
            has_ended: false,
            pending: BytesMut::new(),
            keep_alive,
            wrote_at: Instant::now(),
            timer: Box::pin(tokio::time::sleep(keep_alive)),
        }
    }

    /// Writes events that have been read before the body began.
    pub(crate) fn push(&mut self, batch: Vec<GenerateEvent>) {
        self.pending.reserve(FRAME_BYTES);
        for event in batch {
            self.write(event);
        }
    }

    /// Writes a comment, for a stream whose first event takes long.
    pub(crate) fn push_keep_alive(&mut self) {
        self.writer.write_keep_alive(&mut self.pending);
    }

    fn write(&mut self, event: GenerateEvent) {
        if self.has_ended {
            return;
        }
        let out = &mut self.pending;
        if !self.has_started && !matches!(event, GenerateEvent::Failed(_)) {
            self.has_started = true;
            for (index, _) in (0u32..).zip(&self.offsets) {
                self.writer.write_start(out, index);
                if let Some(echo) = self.echo.get(index as usize).filter(|echo| !echo.is_empty()) {
                    self.writer.write_delta(out, index, echo, None);
                }
            }
        }
        match event {
            GenerateEvent::Delta(delta) => {
                let tokens = logprobs(delta.logprobs);
                let Some(offset) = self.offsets.get_mut(delta.index as usize) else { return };
                let run = (!tokens.is_empty()).then_some(LogprobRun { tokens: &tokens, text_offset: *offset });
                if !delta.text.is_empty() || run.is_some() {
                    *offset = run.map_or(*offset, |run| run.end_offset());
                    self.writer.write_delta(out, delta.index, &delta.text, run);
                }
            }
            GenerateEvent::Reasoning(delta) => {
                if self.include_reasoning {
                    self.writer.write_reasoning(out, delta.index, &delta.text);
                }
            }
            GenerateEvent::Call(delta) => {
                let head = delta.head.as_ref().map(|head| (head.id.as_str(), head.name.as_str()));
                let CallDelta { index, call, arguments, is_end, .. } = &delta;
                let part = kvist_dialect::CallDelta { call: *call, head, arguments, is_end: *is_end };
                self.writer.write_call(out, *index, part);
            }
            GenerateEvent::Finished(end) => {
                let endings = end.choices.iter().map(|choice| ChoiceEnding {
                    index: choice.index,
                    finish: finish_word(choice),
                    stop_string: &choice.stop_string,
                });
                let endings: Vec<ChoiceEnding<'_>> = endings.collect();
                self.writer.write_end(out, &endings, usage_numbers(end.usage));
                self.has_ended = true;
            }
            GenerateEvent::Failed(error) => {
                self.writer.write_error(out, &error);
                self.has_ended = true;
            }
        }
    }

    fn poll_bytes(&mut self, context: &mut Context<'_>) -> Poll<Option<Bytes>> {
        if self.pending.is_empty() {
            if self.has_ended {
                return Poll::Ready(None);
            }
            match Pin::new(&mut self.events).poll_next(context) {
                Poll::Ready(Some(batch)) => self.push(batch),
                Poll::Ready(None) => {
                    self.write(GenerateEvent::Failed(broke_off()));
                }
                Poll::Pending => return self.poll_keep_alive(context),
            }
            if self.pending.is_empty() {
                // A batch that shows nothing yet, such as half a character.
                context.waker().wake_by_ref();
                return Poll::Pending;
            }
        }
        self.wrote_at = Instant::now();
        Poll::Ready(Some(self.pending.split().freeze()))
    }

    /// The timer is set anew only when it fires, so that a flowing stream does not pay for it.
    fn poll_keep_alive(&mut self, context: &mut Context<'_>) -> Poll<Option<Bytes>> {
        while self.timer.as_mut().poll(context).is_ready() {
            let due = self.wrote_at + self.keep_alive;
            let now = Instant::now();
            if due <= now {
                self.wrote_at = now;
                self.timer.as_mut().reset((now + self.keep_alive).into());
                // Polled once more here: the next call may be far away.
                let _ = self.timer.as_mut().poll(context);
                self.push_keep_alive();
                return Poll::Ready(Some(self.pending.split().freeze()));
            }
            self.timer.as_mut().reset(due.into());
        }
        Poll::Pending
    }
}

pub(crate) fn finish_word(end: &ChoiceEnd) -> FinishWord {
    match end.reason {
        FinishReason::Length => FinishWord::Length,
        _ if end.complete_calls > 0 => FinishWord::ToolCalls,
        _ => FinishWord::Stop,
    }
}

pub(crate) fn usage_numbers(usage: Usage) -> UsageNumbers {
    UsageNumbers {
        prompt_tokens: usage.prompt_tokens,
        completion_tokens: usage.completion_tokens,
        cached_tokens: usage.cached_tokens,
        reasoning_tokens: usage.reasoning_tokens,
    }
}
