//! The triggers that reject UPDATE and DELETE on the audit log.
//!
//! They are not part of the migration: with a binary log only accounts with SUPER may create triggers, unless
//! `log_bin_trust_function_creators` is set, and MySQL cannot roll back a failed migration.

use sqlx::{AssertSqlSafe, MySqlPool};

use crate::OpenError;

const TRIGGERS: [(&str, &str); 2] = [("audit_no_update", "UPDATE"), ("audit_no_delete", "DELETE")];

/// Creates the missing triggers.
pub(super) async fn create(pool: &MySqlPool) -> Result<(), OpenError> {
    for (name, operation) in TRIGGERS {
        let count: i64 = sqlx::query_scalar(
            "SELECT CAST(COUNT(*) AS SIGNED) FROM information_schema.triggers \
             WHERE trigger_schema = DATABASE() AND trigger_name = ? AND event_object_table = 'audit'",
        )
        .bind(name)
        .fetch_one(pool)
        .await
        .map_err(OpenError::Open)?;
        if count == 0 {
            let create = format!(
                "CREATE TRIGGER {name} BEFORE {operation} ON audit FOR EACH ROW \
                 SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'the audit log cannot be changed'"
            );
            sqlx::raw_sql(AssertSqlSafe(create)).execute(pool).await.map_err(OpenError::Triggers)?;
        }
    }
    Ok(())
}
