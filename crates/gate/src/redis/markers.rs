//! Markers of comparisons that have come through a queue outside Redis. A marker states that earlier messages of its partition are handled,
//! which matters for a few seconds, so it is kept for a while only.

use stampede_core::ports::GateError;

use super::RedisGate;

/// Longer than a comparison waits for its markers.
const TTL_S: u32 = 60;

impl RedisGate {
    /// Notes that the marker of a comparison has come through a partition.
    pub async fn pass_marker(&self, id: u64, partition: u16) -> Result<(), GateError> {
        let mut command = redis::cmd("SET");
        command.arg(self.marker_key(id, partition)).arg(1).arg("EX").arg(TTL_S);
        let _ok: String = self.send(command).await?;
        Ok(())
    }

    /// Whether the marker of a comparison has come through all partitions.
    pub async fn is_marker_passed(&self, id: u64, partitions: u16) -> Result<bool, GateError> {
        let mut command = redis::cmd("EXISTS");
        for partition in 0..partitions {
            command.arg(self.marker_key(id, partition));
        }
        let passed: u16 = self.send(command).await?;
        Ok(passed == partitions)
    }
}
