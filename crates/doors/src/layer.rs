//! The guard around a tonic server.

use std::{
    future::{Ready, ready},
    sync::Arc,
    task::{Context, Poll},
};

use futures::future::Either;
use http::{Request, Response};
use tonic::Status;
use tower_layer::Layer;
use tower_service::Service;

use crate::{DoorRules, Peer};

/// Puts the guard around a server's services, health and reflection included.
#[derive(Clone, Debug)]
pub struct DoorLayer {
    rules: Arc<DoorRules>,
}

impl DoorLayer {
    /// A guard with these rules. The server must be given connections of a [`crate::Door`]: requests of others count as
    /// without a certificate.
    #[must_use]
    pub fn new(rules: Arc<DoorRules>) -> Self {
        Self { rules }
    }
}

impl<S> Layer<S> for DoorLayer {
    type Service = Guarded<S>;

    fn layer(&self, inner: S) -> Guarded<S> {
        Guarded { inner, rules: Arc::clone(&self.rules) }
    }
}

/// Services behind a guard.
#[derive(Clone, Debug)]
pub struct Guarded<S> {
    inner: S,
    rules: Arc<DoorRules>,
}

impl<S, B, R> Service<Request<B>> for Guarded<S>
where
    S: Service<Request<B>, Response = Response<R>>,
    R: Default,
{
    type Response = Response<R>;
    type Error = S::Error;
    type Future = Either<Ready<Result<Self::Response, Self::Error>>, S::Future>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let peer = request.extensions().get::<Peer>().copied().unwrap_or(Peer::Anonymous);
        match self.rules.check(request.uri().path(), peer) {
            Ok(()) => Either::Right(self.inner.call(request)),
            Err(refusal) => {
                tracing::warn!(reason = refusal.message, "call_refused");
                Either::Left(ready(Ok(Status::from(refusal).into_http())))
            }
        }
    }
}
