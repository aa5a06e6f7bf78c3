//! What every gRPC server has beside its service: health and reflection.

use tonic_health::{
    ServingStatus,
    pb::health_server::{Health, HealthServer},
    server::HealthReporter,
};
use tonic_reflection::server::{Builder, Error, v1, v1alpha};

const HEALTH_SERVICE: &str = "grpc.health.v1.Health";

/// Health of a gRPC server with one service. Clones are the same.
#[derive(Clone, Debug)]
pub struct GrpcHealth {
    reporter: HealthReporter,
    service: &'static str,
}

impl GrpcHealth {
    /// Health that says `NOT_SERVING`, and the service that says it.
    pub async fn start(service: &'static str) -> (Self, HealthServer<impl Health>) {
        let (reporter, server) = tonic_health::server::health_reporter();
        let health = Self { reporter, service };
        health.set_serving(false).await;
        (health, server)
    }

    /// States whether requests are taken. A process that answers is alive, whether it takes any or not.
    pub async fn set_serving(&self, is_serving: bool) {
        let status = if is_serving { ServingStatus::Serving } else { ServingStatus::NotServing };
        for name in ["", "readiness", self.service] {
            self.reporter.set_service_status(name, status).await;
        }
        for name in ["liveness", HEALTH_SERVICE] {
            self.reporter.set_service_status(name, ServingStatus::Serving).await;
        }
    }

    /// Says `NOT_SERVING` and ends what watches, which would hold up the end of the server.
    pub async fn close(&self) {
        self.set_serving(false).await;
        let mut reporter = self.reporter.clone();
        for name in ["", "readiness", self.service, "liveness", HEALTH_SERVICE] {
            reporter.clear_service_status(name).await;
        }
    }
}

/// Reflection of one service and of health, in both versions of the protocol.
///
/// # Errors
/// The descriptors are none.
pub fn reflection(
    descriptor_set: &'static [u8],
    service: &'static str,
) -> Result<
    (
        v1::ServerReflectionServer<impl v1::ServerReflection>,
        v1alpha::ServerReflectionServer<impl v1alpha::ServerReflection>,
    ),
    Error,
> {
    let builder = || {
        Builder::configure()
            .register_encoded_file_descriptor_set(descriptor_set)
            .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
            .with_service_name(service)
            .with_service_name(HEALTH_SERVICE)
    };
    Ok((builder().build_v1()?, builder().build_v1alpha()?))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio_stream::StreamExt as _;
    use tonic::Request;
    use tonic_health::pb::HealthCheckRequest;

    use super::*;

    #[tokio::test]
    async fn closing_says_not_serving_and_ends_what_watches() {
        let (health, server) = GrpcHealth::start("test.Service").await;
        health.set_serving(true).await;
        let request = || Request::new(HealthCheckRequest { service: "test.Service".to_owned() });
        let mut watching =
            tonic_health::pb::health_client::HealthClient::new(server).watch(request()).await.unwrap().into_inner();
        let mut said = Vec::new();
        said.push(watching.next().await.unwrap().unwrap().status);
        health.close().await;
        let rest = async {
            while let Some(response) = watching.next().await {
                said.push(response.unwrap().status);
            }
        };
        tokio::time::timeout(Duration::from_secs(10), rest).await.unwrap();
        assert_eq!(vec![1, 2], said);
    }
}
