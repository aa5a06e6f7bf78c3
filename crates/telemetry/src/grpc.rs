//! What every gRPC server has beside its service: health and reflection.

use std::{collections::BTreeSet, sync::Arc};

use parking_lot::Mutex;
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
    /// What was stated last.
    is_serving: Arc<Mutex<Option<bool>>>,
    /// Names that were given a condition.
    conditions: Arc<Mutex<BTreeSet<String>>>,
}

impl GrpcHealth {
    /// Health that says `NOT_SERVING`, and the service that says it.
    pub async fn start(service: &'static str) -> (Self, HealthServer<impl Health>) {
        let (reporter, server) = tonic_health::server::health_reporter();
        let health = Self { reporter, service, is_serving: Arc::default(), conditions: Arc::default() };
        health.set_serving(false).await;
        (health, server)
    }

    /// States whether requests are taken; who watches hears of changes alone. A process that answers is alive, whether it
    /// takes any or not.
    pub async fn set_serving(&self, is_serving: bool) {
        if self.is_serving.lock().replace(is_serving) == Some(is_serving) {
            return;
        }
        let status = if is_serving { ServingStatus::Serving } else { ServingStatus::NotServing };
        for name in ["", "readiness", self.service] {
            self.reporter.set_service_status(name, status).await;
        }
        for name in ["liveness", HEALTH_SERVICE] {
            self.reporter.set_service_status(name, ServingStatus::Serving).await;
        }
    }

    /// States how something stands beside the service itself, under a name of its own: who asks for the service is not
    /// told. None ends the name.
    pub async fn set_condition(&self, name: &str, is_good: Option<bool>) {
        let mut reporter = self.reporter.clone();
        let Some(is_good) = is_good else {
            self.conditions.lock().remove(name);
            return reporter.clear_service_status(name).await;
        };
        self.conditions.lock().insert(name.to_owned());
        let status = if is_good { ServingStatus::Serving } else { ServingStatus::NotServing };
        reporter.set_service_status(name, status).await;
    }

    /// Says `NOT_SERVING` and ends what watches, which would hold up the end of the server.
    pub async fn close(&self) {
        self.set_serving(false).await;
        let mut reporter = self.reporter.clone();
        for name in ["", "readiness", self.service, "liveness", HEALTH_SERVICE] {
            reporter.clear_service_status(name).await;
        }
        let conditions = std::mem::take(&mut *self.conditions.lock());
        for name in conditions {
            reporter.clear_service_status(&name).await;
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
        health.set_condition("test.condition", Some(true)).await;
        for (name, expected) in [("test.Service", vec![1, 2]), ("test.condition", vec![1])] {
            health.set_serving(true).await;
            health.set_condition("test.condition", Some(true)).await;
            let request = Request::new(HealthCheckRequest { service: name.to_owned() });
            let mut client = tonic_health::pb::health_client::HealthClient::new(server.clone());
            let mut watching = client.watch(request).await.unwrap().into_inner();
            let mut said = vec![watching.next().await.unwrap().unwrap().status];
            health.close().await;
            let rest = async {
                while let Some(response) = watching.next().await {
                    said.push(response.unwrap().status);
                }
            };
            tokio::time::timeout(Duration::from_secs(10), rest).await.unwrap();
            assert_eq!(expected, said, "{name}");
        }
    }

    #[tokio::test]
    async fn what_was_said_is_not_said_again() {
        let (health, server) = GrpcHealth::start("test.Service").await;
        health.set_serving(true).await;
        let request = Request::new(HealthCheckRequest { service: "test.Service".to_owned() });
        let mut client = tonic_health::pb::health_client::HealthClient::new(server);
        let mut watching = client.watch(request).await.unwrap().into_inner();
        let mut said = vec![watching.next().await.unwrap().unwrap().status];
        health.set_serving(false).await;
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

    #[tokio::test]
    async fn a_condition_is_told_to_nobody_who_asks_for_the_service() {
        let (health, server) = GrpcHealth::start("test.Service").await;
        health.set_serving(true).await;
        health.set_condition("test.condition", Some(false)).await;
        let status = async |service: &str| {
            let mut client = tonic_health::pb::health_client::HealthClient::new(server.clone());
            let request = Request::new(HealthCheckRequest { service: service.to_owned() });
            client.check(request).await.map(|response| response.into_inner().status).map_err(|status| status.code())
        };
        assert_eq!(Ok(2), status("test.condition").await);
        for service in ["", "readiness", "liveness", "test.Service"] {
            assert_eq!(Ok(1), status(service).await, "{service}");
        }
        health.set_condition("test.condition", None).await;
        assert_eq!(Err(tonic::Code::NotFound), status("test.condition").await);
    }
}
