//! The guard around a tonic server.

use std::{
    future::{Ready, ready},
    sync::Arc,
    task::{Context, Poll},
    time::Instant,
};

use futures::future::Either;
use http::{Request, Response};
use kvist_errors::{Code, KvistError};
use tonic::Status;
use tower_layer::Layer;
use tower_service::Service;

use crate::{Caller, DoorRules, Peer, pace::Pace, table::paced_method};

/// Puts the guard around a server's services, health and reflection included.
#[derive(Clone, Debug)]
pub struct DoorLayer {
    rules: Arc<DoorRules>,
    pace: Arc<Pace>,
}

impl DoorLayer {
    /// A guard with these rules. The server must be given connections of a [`crate::Door`]: requests of others count as
    /// without a certificate.
    #[must_use]
    pub fn new(rules: Arc<DoorRules>) -> Self {
        Self { rules, pace: Arc::default() }
    }
}

impl<S> Layer<S> for DoorLayer {
    type Service = Guarded<S>;

    fn layer(&self, inner: S) -> Guarded<S> {
        Guarded { inner, rules: Arc::clone(&self.rules), pace: Arc::clone(&self.pace) }
    }
}

/// Services behind a guard.
#[derive(Clone, Debug)]
pub struct Guarded<S> {
    inner: S,
    rules: Arc<DoorRules>,
    pace: Arc<Pace>,
}

impl<S> Guarded<S> {
    /// Whether a call may be made, and made now.
    fn check(&self, path: &str, caller: Caller) -> Result<(), KvistError> {
        self.rules.check(path, caller.peer)?;
        match (paced_method(path), caller.host) {
            (Some(method), Some(host)) => self.pace.take(method, host, Instant::now()),
            _ => Ok(()),
        }
    }
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
        let unknown = Caller { peer: Peer::Anonymous, host: None };
        let caller = request.extensions().get::<Caller>().copied().unwrap_or(unknown);
        match self.check(request.uri().path(), caller) {
            Ok(()) => Either::Right(self.inner.call(request)),
            Err(refusal) => {
                // Whoever calls too often does not fill the log as well.
                if refusal.code == Code::PermissionDenied {
                    tracing::warn!(reason = refusal.message, "call_refused");
                }
                Either::Left(ready(Ok(Status::from(refusal).into_http())))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{convert::Infallible, net::Ipv4Addr};

    use kvist_errors::from_status;

    use super::*;

    #[derive(Clone)]
    struct Answers;

    impl Service<Request<()>> for Answers {
        type Response = Response<()>;
        type Error = Infallible;
        type Future = Ready<Result<Response<()>, Infallible>>;

        fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
            Poll::Ready(Ok(()))
        }

        fn call(&mut self, _: Request<()>) -> Self::Future {
            ready(Ok(Response::new(())))
        }
    }

    async fn asked(server: &mut Guarded<Answers>, path: &str, host: u32) -> Option<Code> {
        let caller = Caller { peer: Peer::Unasked, host: Some(Ipv4Addr::from_bits(host).into()) };
        let request = Request::builder().uri(path).extension(caller).body(()).unwrap();
        let answer = server.call(request).await.unwrap();
        Status::from_header_map(answer.headers()).map(|status| from_status(&status).code)
    }

    #[tokio::test]
    async fn what_looks_after_a_server_is_paced_for_each_host_over_all_its_connections() {
        // One in a thousand seconds, so that none comes back during the test.
        let layer = DoorLayer { rules: Arc::default(), pace: Arc::new(Pace::new(0.001)) };
        let (mut first, mut second) = (layer.layer(Answers), layer.layer(Answers));
        let explain = "/kvist.router.v1.RouterService/Explain";
        assert_eq!(None, asked(&mut first, explain, 1).await);
        for connection in [&mut first, &mut second] {
            assert_eq!(Some(Code::Overloaded), asked(connection, explain, 1).await);
            assert_eq!(None, asked(connection, "/kvist.router.v1.RouterService/Generate", 1).await);
        }
        assert_eq!(None, asked(&mut second, explain, 2).await);
        let health = "/grpc.health.v1.Health/Check";
        assert_eq!(
            [None, Some(Code::Overloaded)],
            [asked(&mut first, health, 1).await, asked(&mut first, health, 1).await]
        );
    }
}
