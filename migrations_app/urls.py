from django.urls import path

from migrations_app import views

app_name = "migrations"

urlpatterns = [
    path("", views.history, name="list"),
    path("<uuid:job_id>/", views.detail, name="detail"),
    path("<uuid:job_id>/abort/", views.abort, name="abort"),
]
