"""URLs of the pages that people open in a browser."""

from django.contrib.auth import views as auth_views
from django.urls import include, path

from controlplane import views
from migrations_app import views as migration_views

urlpatterns = [
    path("", views.dashboard, name="dashboard"),
    path("playground/", views.playground, name="playground"),
    path("live/streams/", views.live_streams, name="live-streams"),
    path("login/", auth_views.LoginView.as_view(redirect_authenticated_user=True), name="login"),
    path("logout/", auth_views.LogoutView.as_view(), name="logout"),
    path("account/", views.account, name="account"),
    path("account/password/", views.change_password, name="change-password"),
    path("account/tokens/", views.create_token, name="create-token"),
    path("account/tokens/<str:digest>/revoke/", views.revoke_token, name="revoke-token"),
    # Here, because the inventory does not know migrations.
    path("instances/<str:vllm_hi_id>/migrate/", migration_views.migrate, name="migrate"),
    path("instances/", include("instances.urls")),
    path("migrations/", include("migrations_app.urls")),
]
