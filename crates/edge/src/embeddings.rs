//! Answers of `/v1/embeddings`.

use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use http::{HeaderMap, Response, StatusCode};
use kvist_dialect::{EmbeddingsInput, parse_embeddings, write_embeddings};
use kvist_router::{Caller, EmbedInput};
use kvist_upstream::{Ask, Relayed};
use tracing::Span;

use crate::{
    answer::{Answerer, Refusal, json, now_unix_seconds, put_request_id},
    body::EdgeBody,
    convert::prompt_of,
};

impl Answerer {
    /// Answers a body of `/v1/embeddings`.
    pub(crate) async fn embed(
        &self,
        headers: &HeaderMap,
        caller: Caller,
        body: Bytes,
        span: Span,
        new_id: impl FnOnce() -> String,
    ) -> Result<Response<EdgeBody>, Refusal> {
        let context = Self::context(headers, caller, span);
        if let Some(head) = self.head_for_upstream(&body).await? {
            let request_id: Arc<str> = new_id().into();
            let ask = Ask {
                request_id: Arc::clone(&request_id),
                traceparent: context.traceparent,
                deadline: context.deadline,
            };
            let relayed = self.upstreams().relay(ask, "/embeddings", &head.model, body, false).await;
            let mut response = match relayed {
                Ok(Relayed::Whole(whole)) => json(whole.status, whole.body),
                Ok(Relayed::Stream(stream)) => Response::new(EdgeBody::Relayed(stream)),
                Err(error) => return Err(Refusal { error, request_id: Some(request_id.to_string()) }),
            };
            put_request_id(&mut response, false, &request_id);
            return Ok(response);
        }
        let EmbeddingsInput { model, inputs, encoding } = self.parse_with(parse_embeddings, body).await?;
        let now = now_unix_seconds();
        let inputs = inputs.into_iter().map(|input| prompt_of(input, false, now)).collect();
        let output = self.generate().embed(context, EmbedInput { model: model.clone(), inputs }).await?;
        let vectors: Vec<&[f32]> = output.embeddings.iter().map(|embedding| embedding.values.as_slice()).collect();
        let tokens = output.embeddings.iter().fold(0_u32, |sum, next| sum.saturating_add(next.prompt_tokens));
        let mut out = BytesMut::new();
        write_embeddings(&mut out, &model, &vectors, encoding, tokens);
        let mut response = json(StatusCode::OK, out);
        put_request_id(&mut response, false, &output.request_id);
        Ok(response)
    }
}
